"""Pictures of *ZeRO's traffic*: what ZeRO sends, over one link and between nodes, and what of it hides."""

from collections.abc import Mapping

from pardemo.draw.charts import DASHES, MARKS, WAYS, bar_chart, bars, curves, line_chart, log, words
from pardemo.draw.style import COLOURS, Picture, new, save


def tokens_to_hide(flops: float, rates: Mapping[str, float]) -> Picture:
    """Time of a micro-batch's computation over its tokens, and of ZeRO-3's traffic, which does not depend on them.

    Args:
        flops: operations that a GPU does in a second. rates: network -> bytes a second; the first one is the fastest.
    """
    fig, ax = new(size=(5.8, 3.5))
    ends = (300.0, 120_000.0)
    computation = {"its multiplications": {end: 6e12 * end / flops for end in ends}}
    curves(ax, computation, colours=["compute"], linewidth=2.5)
    tokens = {name: flops / rate for name, rate in rates.items()}
    for number, (name, rate) in enumerate(rates.items()):
        traffic = 6e12 / rate
        label = "_" * number + "ZeRO-3's traffic"
        curves(ax, {label: dict.fromkeys(ends, traffic)}, colours=["communication"], dashes=["--"], linewidth=1.6)
        ax.scatter([tokens[name]], [traffic], s=46, color="black", zorder=3)
        above = number > 0  # the first two networks may lie close together
        style = {"textcoords": "offset points", "va": "bottom" if above else "top"}
        left = tokens[name] > sum(ends) / 20
        at, aside = (ends[0], 6) if left else (ends[1], 0)
        ax.annotate(name, (at, traffic), (aside, 4 if above else -5), ha="left" if left else "right", **style)
        place = (-5, 4) if above else (5, -5)
        ax.annotate(f"{tokens[name]:,.0f}", (tokens[name], traffic), place, ha="right" if above else "left", **style)
    log(ax, x=[1000, 10_000, 100_000], y=[10, 100, 1000])
    ax.set(xlabel="tokens of a micro-batch on a GPU, T", ylabel="ms for 10⁹ parameters", xlim=ends)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 0.52))
    alt = f"Tokens with which matrix multiplications take as long as ZeRO-3's traffic: {words(tokens, '{:,.0f}')}."
    return save(fig, "zero_communication_tokens", alt)


def sent_by_micro_batches(
    lines: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]]
) -> Picture:
    """Ψ that a rank sends in an optimizer step over its micro-batches: lines predicted, points counted."""
    fig, ax = new(size=(5.8, 3.6))
    for number, (name, line) in enumerate(lines.items()):
        look = {"colours": [WAYS[number]], "dashes": [DASHES[number]], "markerfacecolor": "white", "markeredgewidth": 2}
        curves(ax, {f"_{name}": line}, **look)
        size = 11 - 2 * number  # the first ones are largest, so that points on one place are all seen
        curves(ax, {name: points[name]}, **look | {"dashes": ["none"]}, marks=MARKS[number], markersize=size)
        last = list(line)[-1]
        ax.annotate(f"{line[last]:g} Ψ", (last, line[last]), (9, 0), textcoords="offset points", va="center")
    micro = sorted({m for line in lines.values() for m in line})
    ax.set(xlabel="micro-batches of an optimizer step, m", ylabel="sent by a rank, Ψ", xlim=(0.8, 1.13 * micro[-1]))
    ax.set(xticks=micro, ylim=(0, None))
    ax.legend(title="points: measured; lines: predicted", loc="upper left")
    alt = f"Ψ that a rank sends in a step, by micro-batches. {words(points, '{:.1f}')}."
    return save(fig, "zero_communication_accumulated", alt)


def sent_by_engine(measured: Mapping[str, float], paper: Mapping[str, float], micro_batches: int = 1) -> Picture:
    """Plots what the calls of each engine send on rings in an optimizer step, in Ψ; outlines are the paper's."""
    rule = "the paper" if micro_batches == 1 else "the rules of section 3"  # the paper has one backward pass a step
    micro = "one micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    return bar_chart(
        f"zero_communication_engines_{micro_batches}",
        f"What an engine's calls send in a step, in Ψ: {{}}; outlines: {rule}.",
        {f"Ψ in a step of {micro}": {"series": {"its calls send": measured}, "outline": paper}}, across=True,
        fills={"its calls send": "communication"}, text="{:.2f}", outlined=rule,
    )  # fmt: skip


def added_by_tokens(added: Mapping[int, Mapping[str, float]], micro_batches: int) -> Picture:
    """Plots what each way to shard adds to the computation, in per cent, over the tokens of a micro-batch.

    Args:
        added: tokens -> way -> share of the computation.
    """
    ways = list(next(iter(added.values())))
    lines = {way: {tokens: by_way[way] for tokens, by_way in added.items() if by_way[way] > 1e-3} for way in ways}
    alt = (
        f"Added to the computation, in per cent, by T; a line ends where all hides. {words(lines, '{:.3g}', per=0.01)}."
    )
    return line_chart(
        "zero_communication_added", alt, lines, per=0.01, marks="os^", x="tokens of a micro-batch on a GPU, T",
        y=f"added, % (m = {micro_batches}; logarithmic)", log_x=list(added)[::2], log_y=[1, 3, 10, 30, 100, 300],
        legend="upper right", size=(5.8, 3.4),
    )  # fmt: skip


def ways_between_nodes(
    card: Mapping[str, float], counted: Mapping[str, float], travel_s: Mapping[str, float], took: Mapping[str, float]
) -> Picture:
    """Plots what a node's network card sent in a step with each way to shard, in S, and its seconds; outlines: by the
    bytes.

    Args:
        card: way -> S, predicted; ``counted``: measured. travel_s: way -> seconds of those bytes over the card's rate.
        took: way -> seconds, measured.
    """
    return bar_chart(
        "zero_communication_ways", "A step on two nodes: {}.",
        {
            "a node's network card sends, S": {"series": {"measured": counted}, "outline": card, "text": "{:.2f} S"},
            "a step takes, s": {"series": {"measured": took}, "outline": travel_s, "text": "{:.2f} s"},
        },
        across=True, fills={"measured": "communication"}, outlined="the bytes, predicted, and their time",
    )  # fmt: skip


def memory_and_steps(
    memory: Mapping[str, float], step_s: Mapping[str, Mapping[str, float]], compute_s: float
) -> Picture:
    """GB of states on a GPU with each way to shard, and seconds of a step over each network.

    Args:
        memory: way -> bytes. step_s: network -> way -> seconds. compute_s: of a step's matrix multiplications.
    """
    fig, axes = new(1 + len(step_s), 1, size=(5.8, 2.6 * (1 + len(step_s))))
    summaries = [bars(axes[0], {"states": memory}, fills={"states": "optimizer states"}, per=1e9, across=True,
                 text="{:.1f}")]  # fmt: skip
    axes[0].set_xlabel("model states on each GPU, GB")
    for ax, (network, seconds) in zip(axes[1:], step_s.items(), strict=True):
        style = {"across": True, "text": "{:.3g}"}
        summaries.append(bars(ax, {"step": seconds}, fills={"step": ("communication", "")}, **style))
        label = f"computation, {compute_s:.2g} s"
        ax.axvline(compute_s, color=COLOURS["compute"], linewidth=3, zorder=2.5, label=label)
        ax.set_xlabel(f"seconds of a step, {network}")
    fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=1)
    steps = "; ".join(f"{network}: {text}" for network, text in zip(step_s, summaries[1:], strict=True))
    alt = f"GB of states on a GPU: {summaries[0]}. Seconds of a step, {compute_s:.2g} of them computation: {steps}."
    return save(fig, "zero_communication_which", alt)
