"""Pictures of *ZeRO's traffic*: what ZeRO sends, over one link and between nodes, and what rounding to 8 bits costs."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.draw.charts import DASHES, MARKS, WAYS, bar_chart, bars, curves, key, line_chart, log, words
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
    ax.legend(loc="lower right", bbox_to_anchor=(1, 0.32))
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


#: What the predicted seconds of a step are made of: its name, its label, and how it is filled.
_PARTS = (
    ("between", "predicted: between nodes", ("white", "")),
    ("inside", "inside nodes", ("white", "////")),
    ("messages", "messages", ("white", "...")),
    ("work", "multiplications, rounding", ("compute", "")),
)


def ways_between_nodes(
    card: Mapping[str, float],
    counted: Mapping[str, float],
    parts: Mapping[str, Mapping[str, float]],
    took: Mapping[str, float],
) -> Picture:
    """What a node's network card sent in a step with each way to shard, in S, and its seconds; outlines are predicted.

    Args:
        card: way -> S, predicted; ``counted``: measured. parts: way -> a part of its seconds, as it is predicted.
        took: way -> seconds, measured.
    """
    fig, (ax, below) = new(2, 1, size=(5.8, 2.4 + 0.92 * len(took)), height_ratios=(1, 1.7))
    counted = {name: counted[name] for name in took}
    sent = bars(ax, {"measured": counted}, card, fills={"measured": "communication"}, across=True, text="{:.2f} S")
    ax.set(xlabel="a node's network card sends, S")
    series = {label: {name: parts[name][part] for name in took} for part, label, _ in _PARTS}
    style = {"across": True, "text": "{:.2f} s", "wide": 0.34, "room": 1.2}
    places = np.arange(len(took))
    seconds = bars(below, {"_took": took}, fills={"_took": "communication"}, at=places - 0.2, **style)
    most = below.get_xlim()[1]
    bars(below, series, fills={label: look for _, label, look in _PARTS}, stacked=True, at=places + 0.17, **style)
    below.set(xlabel="seconds: measured, and predicted part by part", xlim=(0, max(most, below.get_xlim()[1])))
    below.set_yticks(places, list(took))
    below.set_ylim(len(took) - 0.4, -0.6)
    key(fig)
    alt = f"A step on two nodes, over a network card: {sent}; in seconds: {seconds}."
    return save(fig, f"zero_communication_ways_{len(took)}", alt)


def hpz_on_nodes(measured: Mapping[str, Mapping[str, float]], rings: Mapping[str, float]) -> Picture:
    """What a node's network card sent in a micro-batch with and without hpZ, in S; outlines: on rings, as nccl sends.

    Args:
        measured: whose engine -> way -> S. rings: way -> S, predicted.
    """
    rows = {f"{whose}: {way}": (value, rings[way]) for whose, of in measured.items() for way, value in of.items()}
    sent, rule = ({name: of[at] for name, of in rows.items()} for at in (0, 1))
    return bar_chart(
        "zero_communication_hpz", "A node's network card sends in a micro-batch: {}.",
        {"a node's network card sends, S": {"series": {"measured": sent}, "outline": rule}}, across=True,
        fills={"measured": "communication"}, text="{:.2f} S", outlined="on rings, as nccl sends", size=(5.8, 2.9),
        at=[place + 0.35 * (place // len(rings)) for place in range(len(rows))],
    )  # fmt: skip


def rounding_by_block(errors_by_scale: Mapping[str, Sequence[float]]) -> Picture:
    """How far off each block of numbers is after rounding to 8 bits, in per cent, for each choice of scales."""
    fig, ax = new(size=(5.8, 3.0))
    curves(ax, errors_by_scale, per=0.01, drawstyle="steps-mid")
    ax.set(xlabel="block of 256 numbers", ylabel="error, per cent")
    ax.set_ylim(0, 145 * max(map(max, errors_by_scale.values())))
    ax.legend(loc="upper right")
    told = "; ".join(f"{name}: {100 * min(of):.2g} to {100 * max(of):.2g}" for name, of in errors_by_scale.items())
    return save(fig, "zero_communication_scales", f"Error of blocks in 8 bits, in per cent. {told}.")


def errors_by_ranks(errors: Mapping[str, Mapping[int, float]]) -> Picture:
    """Relative error of a sum of N tensors that travel in 8 bits, in per cent, for each way to add them."""
    return line_chart(
        "zero_communication_sums", f"Error of a sum in 8 bits, in per cent, by N. {words(errors, '{:.2f}', per=0.01)}.",
        errors, per=0.01, marks="os^D", x="ranks N", y="error of the sum, per cent", legend="upper left",
        log_x=list(next(iter(errors.values()))), size=(5.8, 3.4),
    )  # fmt: skip


def sent_by_engine(measured: Mapping[str, float], paper: Mapping[str, float], micro_batches: int = 1) -> Picture:
    """What the calls of each engine send on rings in an optimizer step, in Ψ; outlines are the paper's."""
    rule = "the paper" if micro_batches == 1 else "the rules of section 3"  # the paper has one backward pass a step
    of = "one micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    return bar_chart(
        f"zero_communication_engines_{micro_batches}",
        f"What an engine's calls send in a step, in Ψ: {{}}; outlines: {rule}.",
        {f"Ψ in a step of {of}": {"series": {"its calls send": measured}, "outline": paper}}, across=True,
        fills={"its calls send": "communication"}, text="{:.2f}", outlined=rule,
    )  # fmt: skip


def memory_and_wire(
    memory: Mapping[str, float],
    seconds: Mapping[str, Mapping[str, float]],
    compute_s: float,
    step_s: Mapping[str, float],
    micro_batches: int,
) -> Picture:
    """GB of states on a GPU with each way to shard, seconds between nodes of one micro-batch, and a step of several.

    Args:
        memory: way -> bytes. seconds: name of a network -> way -> seconds of a micro-batch's traffic between nodes.
        compute_s: seconds of its matrix multiplications.
        step_s: way -> seconds of ``micro_batches`` on the last network.
    """
    fig, (ax, below, last) = new(3, 1, size=(5.8, 9.2), height_ratios=(1, 1.7, 1))
    told = [
        bars(ax, {"states": memory}, fills={"states": "optimizer states"}, per=1e9, across=True, text="{:.1f}"),
        bars(below, seconds, fills=dict(zip(seconds, (("communication", "///"), ("communication", "")), strict=True)),
             across=True, text="{:.2g}"),
        bars(last, {"step": step_s}, fills={"step": ("communication", "")}, across=True, text="{:.0f}"),
    ]  # fmt: skip
    line = {"color": COLOURS["compute"], "linewidth": 3, "zorder": 2.5}
    below.axvline(compute_s, label=f"computation, {compute_s:.2g} s a micro-batch", **line)
    last.axvline(micro_batches * compute_s, **line)
    ax.set_xlabel("model states on each GPU, GB")
    below.set_xlabel("seconds between nodes, one micro-batch")
    last.set_xlabel(f"seconds of {micro_batches} micro-batches, {list(seconds)[-1]}")
    fig.legend(*below.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    return save(
        fig, "zero_communication_which",
        f"GB of states on a GPU: {told[0]}. Seconds between nodes: {told[1]}; computation {compute_s:.2g}. "
        f"Seconds of a step of {micro_batches} micro-batches: {told[2]}.",
    )  # fmt: skip
