"""Pictures of *ZeRO-R*: what fills a GPU beside the model states, and what each answer leaves of it."""

from collections.abc import Mapping, Sequence

from pardemo.book.chapters.zero_r.drawings import Filled
from pardemo.draw import palette
from pardemo.draw.charts import bars, curves, key, patch, words
from pardemo.draw.style import COLOURS, Picture, new, save

#: What lies in a GPU's memory.
_BYTES = {
    "model states": "optimizer states",
    "activations": "activations",
    "one block at work": ("activations", "///"),
    "buffer": "buckets",
}


def remaining_bytes(
    rows: Mapping[str, Mapping[str, float]], room: float, small: Mapping[str, Mapping[str, float]] | None = None
) -> Picture:
    """GB in a GPU by what they are, a bar for each way to train; a line is what may be filled.

    Args:
        rows: way -> one of model states, activations, one block at work, buffer -> bytes.
        room: bytes that may be filled.
        small: more rows, below on a scale of their own.
    """
    panels = [panel for panel in (rows, small) if panel]
    heights = [len(panel) for panel in panels]
    fig, axes = new(len(panels), 1, size=(5.8, 1.0 + 0.5 * (len(panels) + sum(heights))), squeeze=False,
                    height_ratios=heights)  # fmt: skip
    summaries = []
    for ax, panel in zip(axes.flat, panels, strict=True):
        series = {kind: {way: kinds.get(kind, 0.0) for way, kinds in panel.items()} for kind in _BYTES}
        summaries.append(bars(ax, series, across=True, stacked=True, per=1e9, fills=_BYTES, text="{:.1f}"))
        ax.set_xlabel("on each GPU, GB")
    axes[0, 0].axvline(room / 1e9, color="black", linewidth=1.6, label=f"92 % of the GPU's memory: {room / 1e9:.0f} GB")
    axes[0, 0].set_xlim(0, max(axes[0, 0].get_xlim()[1], 1.1 * room / 1e9))
    key(fig, ncols=2)
    alt = f"GB on each GPU: {', '.join(summaries)}; {room / 1e9:.0f} may be filled."
    return save(fig, f"zero_r_remaining_{sum(heights)}", alt)


def kept_against_flops(
    kept: Mapping[str, float], flops: Mapping[str, float], expected: Mapping[str, tuple[float, float]]
) -> Picture:
    """Plots what a block keeps for its backward pass against a step's operations, a point for each way to recompute.

    Args:
        kept: way -> activations. flops: way -> times those without recomputation. expected: way -> both predicted.
    """
    fig, ax = new(size=(5.8, 3.9))
    for way, value in kept.items():
        text = f"{way}\n{value:.1f}; {flops[way]:.2f}"
        ax.annotate(text, (value, flops[way]), (11, 2), textcoords="offset points", va="center")
    measured = {value: flops[way] for way, value in kept.items()}
    curves(ax, {"measured": measured}, colours=["activations"], dashes=["none"], marks="o", markersize=8)
    rings = {"markersize": 13, "fillstyle": "none", "markeredgewidth": 1.2}
    curves(
        ax,
        {"predicted": dict(expected[way] for way in kept)},
        colours=["predicted"],
        dashes=["none"],
        marks="o",
        **rings,
    )
    ax.set(xlabel="kept by a block, A", ylabel="operations of a step, × those without")
    ax.set(xlim=(0, 1.32 * max(kept.values())), ylim=(0.96, 1.04 * max(flops.values())))
    ax.legend(loc="upper right")
    ways = "; ".join(f"{way}: {value:.1f} activations, {flops[way]:.2f}" for way, value in kept.items())
    return save(fig, "zero_r_recomputed", f"Kept by a block and operations of a step, by what is recomputed. {ways}.")


def can_leave(ways: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> Picture:
    """Plots how many activations can go to the host while their block computes, over the hidden size, a line for each
    link.

    Args:
        ways: link -> activations, one for each of ``sizes``.
    """
    fig, ax = new(size=(5.8, 3.6))
    lines = {name: dict(zip(sizes, curve, strict=True)) for name, curve in ways.items()}
    summary = curves(ax, lines, colours=["communication"], text="{:.1f}")
    for number, label, end in ((1, "a checkpoint: 1 A", "right"), (17, "all that a block keeps: 17 A", "left")):
        ax.axhline(number, color=COLOURS["activations"], linewidth=1.8)
        at = (sizes[-1 if end == "right" else 0], number)
        ax.annotate(label, at, (0, 4), textcoords="offset points", ha=end)
    ax.set(xlabel="width h, s = 4,096", ylabel="A that can leave", ylim=(0, 1.1 * max(map(max, ways.values()))))
    ax.legend(loc="center left")
    alt = f"Activations that can leave while their block computes, by the hidden size, {sizes[0]:,} to {sizes[-1]:,}."
    return save(fig, "zero_r_can_leave", f"{alt} {summary}.")


def buffers(measured: Mapping[tuple[str, int], float], expected: Mapping[tuple[str, int], float]) -> Picture:
    """MiB that summing gradients makes beside them, by (kind of buffer, layers of the model); lines are predicted."""
    fig, ax = new(size=(5.8, 3.2))
    names = list(dict.fromkeys(name for name, _ in measured))
    tables = [
        {name: {n: row[name, n] for kind, n in row if kind == name} for name in names} for row in (measured, expected)
    ]
    looks = (("s", "--", "buckets", 7), ("o", "-", "gradients", 13), ("x", "none", "predicted", 7))
    for name, (mark, dash, colour, size) in zip(names, looks, strict=False):
        colours = [palette.MEANINGS[colour]]
        if dash != "none":
            curves(ax, {f"_{name}": tables[1][name]}, per=2**20, colours=colours, dashes=[dash])
        # around a cross a ring
        style = {"markersize": size, "fillstyle": "none" if mark == "o" else "full", "markeredgewidth": 2}
        curves(ax, {name: tables[0][name]}, per=2**20, colours=colours, dashes=["none"], marks=mark, **style)
    ax.set(xlabel="layers of the model", ylabel="made beside the gradients, MiB", ylim=(0, None))
    ax.set_xticks(sorted({layers for _, layers in measured}))
    ax.legend(title="lines: predicted", loc="upper left")
    summary = words(tables[0], "{:.1f}", per=2**20)
    return save(fig, "zero_r_buffers", f"MiB made beside the gradients, by layers. {summary}.")


def segments(rows: Mapping[str, Filled], room: int) -> Picture:
    """Plots where tensors lie in the segments that the allocator has asked of CUDA, a row for each way.

    Args:
        rows: way -> what became of it. room: MiB of the memory.
    """
    fig, ax = new(size=(5.8, 1.2 + 1.1 * len(rows)))
    for row, (name, outcome) in enumerate(rows.items()):
        begin = 0
        for size, taken in outcome.segments:
            ax.broken_barh([(begin, size)], (row - 0.2, 0.5), facecolor=COLOURS["idle"], edgecolor="black", linewidth=1)
            ax.text(begin + size / 2, row + 0.32, f"a segment of {size}", ha="center", va="top")
            spans = [(begin + place, length) for _, place, length in taken]
            style = {"facecolor": COLOURS["activations"], "edgecolor": "white", "linewidth": 0.8}
            ax.broken_barh(spans, (row - 0.2, 0.5), **style)
            begin += size
        end = "all layers pass" if outcome.failed is None else f"{outcome.wanted} MiB for an {outcome.failed}: no room"
        ax.text(12, row - 0.25, f"{name}: {end}", va="bottom")
    ax.axvline(room, color="black", linewidth=1.6)
    ax.set(xlabel="MiB asked of CUDA, one segment after the other", xlim=(0, 1.01 * room), yticks=[])
    ax.set_ylim(len(rows) - 0.4, -0.75)
    ax.grid(visible=False)
    key(fig, patch("checkpoints", "activations"), patch("free in a segment", ("idle", "")))
    summary = "; ".join(
        f"{name}: {outcome.taken} MiB taken of {outcome.reserved} in {len(outcome.segments)} segments, "
        + ("all layers pass" if outcome.failed is None else f"no room for {outcome.wanted}")
        for name, outcome in rows.items()
    )
    return save(fig, "zero_r_segments", f"Memory at the end of the forward pass. {summary}.")


def step_and_peak(
    seconds: Mapping[str, float], predicted: Mapping[str, float], peaks: Mapping[str, float], computing_s: float
) -> Picture:
    """Milliseconds of a step and what is kept at its peak, a bar for each way; outlines are predicted.

    Args:
        seconds, predicted: way -> seconds of a step. peaks: way -> A at the peak. computing_s: of the step without
            any wait, as a line.
    """
    ratios = [len(seconds), len(peaks)]
    fig, axes = new(2, 1, size=(5.8, 2.3 + 0.42 * sum(ratios)), height_ratios=ratios)
    steps = bars(axes[0], {"step": seconds}, predicted, fills={"step": "compute"}, per=1e-3, across=True, text="{:.0f}")
    axes[0].axvline(1e3 * computing_s, color="black", linestyle="--", linewidth=1.2, zorder=1)
    held = bars(axes[1], {"peak": peaks}, fills={"peak": "activations"}, across=True, text="{:.0f}")
    axes[0].set_xlabel("milliseconds of a step")
    axes[1].set_xlabel("activations on the device at the peak, A")
    key(fig, ncols=3)
    return save(fig, "zero_r_step_and_peak", f"A step takes, in ms: {steps}. At the peak it keeps, in A: {held}.")


def offloaded_steps(seconds: Mapping[str, float], parts: Mapping[str, Mapping[str, float]]) -> Picture:
    """Milliseconds of a step with Adam on the host, a bar for each link, by what the step is predicted to wait for.

    Args:
        seconds: link -> measured. parts: link -> what the step does -> predicted seconds.
    """
    fig, ax = new(size=(5.8, 1.9 + 0.6 * len(seconds)))
    fills = {
        "computation": "compute", "gradients out": ("gradients", "//"), "Adam": "optimizer states",
        "parameters back": ("parameters", "\\\\"),
    }  # fmt: skip
    series = {kind: {link: kinds[kind] for link, kinds in parts.items()} for kind in fills}
    texts = [f"{1e3 * s:.0f}" for s in seconds.values()]
    bars(ax, series, fills=fills, per=1e-3, across=True, stacked=True, points=("measured", seconds), text=texts)
    ax.set(xlabel="milliseconds of a step; bars are predicted")
    key(fig, ncols=3)
    return save(
        fig, "zero_r_adam_on_host", f"A step with Adam on the host takes {words(seconds, '{:.0f} ms', per=1e-3)}."
    )
