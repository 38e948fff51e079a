"""Pictures of *ZeRO's traffic*: what ZeRO sends, over one link and between nodes, and what rounding to 8 bits costs."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

_MARKERS, _STYLES = ("o", "s", "^", "D"), ("-", "--", "-.", ":")


def tokens_to_hide(flops: float, rates: Mapping[str, float]) -> Picture:
    """Time of a micro-batch's computation over its tokens, and of ZeRO-3's traffic, which does not depend on them.

    Args:
        flops: operations that a GPU does in a second. rates: network -> bytes a second; the first one is the fastest.
    """
    fig, ax = new(size=(5.8, 3.5))
    ends = np.array([300.0, 120_000.0])
    ax.plot(ends, 6e12 * ends / flops, color=COLOURS["compute"], linewidth=2.5, label="its multiplications")
    for number, (name, rate) in enumerate(rates.items()):
        tokens, traffic = flops / rate, 6e12 / rate
        label = "ZeRO-3's traffic" if number == 0 else None
        ax.plot(ends, [traffic, traffic], "--", color=COLOURS["communication"], linewidth=1.6, label=label)
        ax.scatter([tokens], [traffic], s=46, color="black", zorder=3)
        above = number > 0  # the first two networks may lie close together
        style = {"textcoords": "offset points", "va": "bottom" if above else "top"}
        left = tokens > ends.mean() / 10
        at, aside = (ends[0], 6) if left else (ends[1], 0)
        ax.annotate(name, (at, traffic), (aside, 4 if above else -5), ha="left" if left else "right", **style)
        place = (-5, 4) if above else (5, -5)
        ax.annotate(f"{tokens:,.0f}", (tokens, traffic), place, ha="right" if above else "left", **style)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks([1000, 10_000, 100_000], ["1,000", "10,000", "100,000"])
    ax.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    ax.set(xlabel="tokens of a micro-batch on a GPU, T", ylabel="ms for 10⁹ parameters", xlim=tuple(ends))
    ax.legend(loc="lower right", bbox_to_anchor=(1, 0.32))
    values_text = ", ".join(f"{name} {flops / rate:,.0f}" for name, rate in rates.items())
    return save(
        fig,
        "zero_communication_tokens",
        f"Tokens with which matrix multiplications take as long as ZeRO-3's traffic: {values_text}.",
    )


def sent_by_micro_batches(
    lines: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]]
) -> Picture:
    """Ψ that a rank sends in an optimizer step over its micro-batches: lines predicted, points counted."""
    fig, ax = new(size=(5.8, 3.6))
    colours = tuple(palette.WAYS.values())
    for number, (name, line) in enumerate(lines.items()):
        colour = colours[number]
        ax.plot(list(line), list(line.values()), _STYLES[number], color=colour, linewidth=1.6)
        of = points[name]
        # the first ones largest, so that points on one place are all seen
        style = {"s": 110 - 35 * number, "marker": _MARKERS[number], "facecolors": "white", "edgecolors": colour}
        ax.scatter(list(of), list(of.values()), linewidths=2, label=name, zorder=3 + number, **style)
        last = list(line)[-1]
        ax.annotate(f"{line[last]:g} Ψ", (last, line[last]), (9, 0), textcoords="offset points", va="center")
    micro = sorted({m for line in lines.values() for m in line})
    ax.set_xticks(micro)
    ax.set(xlabel="micro-batches of an optimizer step, m", ylabel="sent by a rank, Ψ", xlim=(0.8, 1.13 * micro[-1]))
    ax.set_ylim(bottom=0)
    ax.legend(title="points: measured; lines: predicted", loc="upper left")
    values_text = "; ".join(
        f"{n}: " + ", ".join(f"{v:.1f} at m = {m}" for m, v in of.items()) for n, of in points.items()
    )
    return save(fig, "zero_communication_accumulated", f"Ψ that a rank sends in a step. {values_text}.")


#: What the seconds of a step are made of -> its label, and how it is filled.
_PARTS = {
    "between": ("predicted: between nodes", {"facecolor": "white"}),
    "inside": ("inside nodes", {"facecolor": "white", "hatch": "////"}),
    "messages": ("messages", {"facecolor": "white", "hatch": "..."}),
    "work": ("multiplications, rounding", {"facecolor": COLOURS["compute"]}),
}


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
    names = list(took)
    fig, (ax, below) = new(2, 1, size=(5.8, 2.4 + 0.92 * len(names)), height_ratios=(1, 1.7))
    places = np.arange(len(names))
    values, outline = ([of[name] for name in names] for of in (counted, card))
    ax.barh(places, values, 0.55, color=COLOURS["communication"], label="measured")
    ax.barh(places, outline, 0.68, fill=False, edgecolor="black", linewidth=1.2)
    for place, value, line in zip(places, values, outline, strict=True):
        ax.annotate(f"{value:.2f} S", (max(value, line), place), (5, 0), textcoords="offset points", va="center")
    ax.set(xlabel="a node's network card sends, S", xlim=(0, 1.2 * max(values + outline)))
    below.barh(places - 0.2, [took[name] for name in names], 0.32, color=COLOURS["communication"])
    left = np.zeros(len(names))
    for part, (label, style) in _PARTS.items():
        wide = np.array([parts[name][part] for name in names])
        below.barh(places + 0.17, wide, 0.36, left=left, edgecolor="black", linewidth=1.2, label=label, **style)
        left += wide
    for place, name in zip(places, names, strict=True):
        for at, value in ((place - 0.2, took[name]), (place + 0.17, sum(parts[name].values()))):
            below.annotate(f"{value:.2f} s", (value, at), (5, 0), textcoords="offset points", va="center")
    below.set(xlabel="seconds: measured, and predicted part by part", xlim=(0, 1.2 * max(*took.values(), *left)))
    for axes in (ax, below):
        axes.set_yticks(places, names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
    handles, labels = ([*above, *under] for above, under in zip(*_legends(ax, below), strict=True))
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
    values_text = "; ".join(f"{name} {counted[name]:.2f} S, {took[name]:.2f} s" for name in names)
    return save(
        fig,
        f"zero_communication_ways_{len(names)}",
        f"A step on two nodes, over a network card and in seconds: {values_text}.",
    )


def _legends(*axes: Axes) -> list[tuple[list, list[str]]]:
    return [ax.get_legend_handles_labels() for ax in axes]


def hpz_on_nodes(measured: Mapping[str, Mapping[str, float]], rings: Mapping[str, float]) -> Picture:
    """What a node's network card sent in a micro-batch with and without hpZ, in S; outlines: on rings, as nccl sends.

    Args:
        measured: whose engine -> way -> S. rings: way -> S, predicted.
    """
    fig, ax = new(size=(5.8, 2.7))
    rows = [(whose, way, value) for whose, of in measured.items() for way, value in of.items()]
    places = [place + 0.35 * (place // len(rings)) for place in range(len(rows))]
    ax.barh(places, [value for *_, value in rows], 0.6, color=COLOURS["communication"], label="measured")
    outline = [rings[way] for _, way, _ in rows]
    ax.barh(places, outline, 0.76, fill=False, edgecolor="black", linewidth=1.2, label="on rings, as nccl sends")
    for place, (*_, value) in zip(places, rows, strict=True):
        ax.annotate(f"{value:.2f} S", (value, place), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, [f"{whose}: {way}" for whose, way, _ in rows])
    ax.set(xlabel="a node's network card sends, S", xlim=(0, 1.2 * max(value for *_, value in rows)))
    ax.set_ylim(places[-1] + 0.6, -0.6)
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(f"{whose}, {way} {value:.2f} S" for whose, way, value in rows)
    return save(fig, "zero_communication_hpz", f"A node's network card sends in a micro-batch: {values_text}.")


def rounding_by_block(errors_by_scale: Mapping[str, Sequence[float]]) -> Picture:
    """How far off each block of numbers is after rounding to 8 bits, in per cent, for each choice of scales."""
    fig, ax = new(size=(5.8, 3.0))
    colours = tuple(palette.WAYS.values())
    for number, (name, block_errors) in enumerate(errors_by_scale.items()):
        style = {"color": colours[number], "label": name, "linewidth": 1.8, "where": "mid"}
        ax.step(range(len(block_errors)), [100 * error for error in block_errors], _STYLES[number], **style)
    ax.set(xlabel="block of 256 numbers", ylabel="error, per cent")
    ax.set_ylim(0, 1.45 * max(100 * max(block_errors) for block_errors in errors_by_scale.values()))
    ax.legend(loc="upper right")
    values_text = "; ".join(
        f"{name}: {100 * min(block_errors):.2g} to {100 * max(block_errors):.2g}"
        for name, block_errors in errors_by_scale.items()
    )
    return save(fig, "zero_communication_scales", f"Error of blocks in 8 bits, in per cent. {values_text}.")


def errors_by_ranks(errors: Mapping[str, Mapping[int, float]]) -> Picture:
    """Relative error of a sum of N tensors that travel in 8 bits, in per cent, for each way to add them."""
    fig, ax = new(size=(5.8, 3.4))
    colours = tuple(palette.WAYS.values())
    for number, (name, by_ranks) in enumerate(errors.items()):
        values = [100 * value for value in by_ranks.values()]
        ax.plot(list(by_ranks), values, _MARKERS[number] + _STYLES[number], color=colours[number], label=name)
    sizes = list(next(iter(errors.values())))
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    ax.set(xlabel="ranks N", ylabel="error of the sum, per cent")
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left")
    values_text = "; ".join(
        f"{n}: " + ", ".join(f"{100 * v:.2f} at N = {k}" for k, v in by_ranks.items()) for n, by_ranks in errors.items()
    )
    return save(fig, "zero_communication_sums", f"Error of a sum in 8 bits, in per cent. {values_text}.")


def sent_by_engine(measured: Mapping[str, float], paper: Mapping[str, float], micro_batches: int = 1) -> Picture:
    """What the calls of each engine send on rings in an optimizer step, in Ψ; outlines are the paper's."""
    fig, ax = new(size=(5.8, 0.9 + 0.42 * len(measured)))
    places, values = np.arange(len(measured)), list(measured.values())
    outline = [paper[name] for name in measured]
    rule = "the paper" if micro_batches == 1 else "the rules of section 3"  # the paper has one backward pass a step
    ax.barh(places, values, 0.55, color=COLOURS["communication"], label="its calls send")
    ax.barh(places, outline, 0.7, fill=False, edgecolor="black", linewidth=1.2, label=rule)
    for place, value in enumerate(values):
        text = ax.annotate(f"{value:.2f}", (value, place), (7, 0), textcoords="offset points", va="center")
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # an outline may run behind
    ax.set_yticks(places, list(measured))
    of = "one micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    ax.set(xlabel=f"Ψ in a step of {of}", xlim=(0, 1.13 * max(values + outline)), ylim=(len(measured) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = ", ".join(f"{name} {value:.2f} Ψ" for name, value in measured.items())
    return save(
        fig,
        f"zero_communication_engines_{micro_batches}",
        f"What an engine's calls send in a step: {values_text}; outlines: {rule}.",
    )


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
    names, network = list(memory), list(seconds)[-1]
    places = np.arange(len(names))
    _bars(ax, [memory[name] / 1e9 for name in names], COLOURS["optimizer states"], "{:.1f}")
    ax.set_xlabel("model states on each GPU, GB")
    high = 0.8 / len(seconds)
    most = max(value for of in seconds.values() for value in of.values())
    for number, (name_of, of) in enumerate(seconds.items()):
        at = places + (number - (len(seconds) - 1) / 2) * high
        style = {"color": COLOURS["communication"], "hatch": "" if number else "///", "edgecolor": "white"}
        below.barh(at, [of[name] for name in names], 0.9 * high, label=name_of, **style)
        for place, name in zip(at, names, strict=True):
            beside = max(of[name], compute_s * (of[name] < 2 * compute_s))  # not on the computation's line
            below.annotate(f"{of[name]:.2g}", (beside, place), (5, 0), textcoords="offset points", va="center")
    below.axvline(
        compute_s, color=COLOURS["compute"], linewidth=3, label=f"computation, {compute_s:.2g} s a micro-batch"
    )
    below.set(xlabel="seconds between nodes, one micro-batch", xlim=(0, 1.15 * most))
    _bars(last, [step_s[name] for name in names], COLOURS["communication"], "{:.0f}")
    all_s = micro_batches * compute_s
    last.axvline(all_s, color=COLOURS["compute"], linewidth=3)
    last.set_xlabel(f"seconds of {micro_batches} micro-batches, {network}")
    for axes in (ax, below, last):
        axes.set_yticks(places, names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
    fig.legend(*below.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    values_text = "; ".join(
        f"{name} {memory[name] / 1e9:.1f} GB, "
        + ", ".join(f"{of[name]:.2g} s with {net}" for net, of in seconds.items())
        + f", a step of {micro_batches} micro-batches {step_s[name]:.0f} s"
        for name in names
    )
    return save(
        fig,
        "zero_communication_which",
        f"States on a GPU and seconds between nodes: {values_text}; computation {compute_s:.2g} s.",
    )


def _bars(ax: Axes, values: list[float], colour: str, text: str) -> None:
    """A bar for each value, one below the other, and its number beside it."""
    ax.barh(range(len(values)), values, 0.55, color=colour)
    for place, value in enumerate(values):
        ax.annotate(text.format(value), (value, place), (5, 0), textcoords="offset points", va="center")
    ax.set_xlim(0, 1.15 * max(values))
