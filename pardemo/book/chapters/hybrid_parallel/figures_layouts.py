"""Pictures of chapter 05: strong scaling, the layouts that a procedure chooses, and ways to cut a replica."""

from collections.abc import Mapping

import numpy as np

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.groups import ParallelDims
from pardemo.planner.layouts.charts import PARTS, stacked

#: Dimension -> the field of a layout, and its colour in the drawing of the cube; there the pipeline has the page's own.
_DIMENSIONS = {
    "tensor, t": ("tp", COLOURS["activations"]),
    "stages, p": ("pp", palette.OTHER),
    "copies, d": ("dp", COLOURS["gradients"]),
}

_PLANNED = {"the pipeline's bubble": "pipeline bubble"}  # the planner's name -> that of the pictures


def strong_scaling(formulas: Mapping[int, float], paper: Mapping[int, float]) -> Picture:
    """Strong scaling: how many times as fast as one GPU t GPUs are, by the formulas and in the paper."""
    fig, ax = new(size=(5.8, 3.2))
    sizes = [1, *formulas]
    ax.plot(sizes, sizes, ":", color=palette.OTHER, linewidth=1.6, label="t times as fast")
    ax.plot(sizes, [1, *formulas.values()], color=palette.PREDICTED, linewidth=1.6, label="the formulas")
    ax.scatter([1, *paper], [1, *paper.values()], s=46, color=COLOURS["compute"], zorder=3, label="the paper")
    for t, value in paper.items():
        ax.annotate(f"{value:g}", (t, value), (0, -14), textcoords="offset points", ha="center")
    for t, value in formulas.items():
        ax.annotate(f"{value:.1f}", (t, value), (9, -6), textcoords="offset points", ha="left")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(sizes, sizes)
    ax.minorticks_off()
    ax.set(xlabel="GPUs that share the 1.2B model, t", ylabel="times as fast as one")
    ax.set(xlim=(0.9, 10), ylim=(0.8, 10))
    ax.legend(loc="upper left")
    values_text = "; ".join(f"{t} GPUs {value:.2f}, paper {paper[t]:g}" for t, value in formulas.items())
    return save(fig, "hybrid_parallel_strong", f"Times as fast as one GPU, by the formulas: {values_text}.")


def chosen_layouts(
    chosen: Mapping[str, tuple[ParallelDims, str]], tokens: Mapping[str, tuple[float, float]]
) -> Picture:  # fmt: skip
    """For each job the tokens of a GPU beside those that ZeRO-3 needs, and how its GPUs are split.

    Args:
        chosen: job -> (layout, engine of its replicas). tokens: job -> (of a GPU, that ZeRO-3 needs).
    """
    fig, (left, right) = new(1, 2, size=(6.4, 0.52 * len(chosen) + 1.8), sharey=True, width_ratios=(1, 2.2))
    places = np.arange(len(chosen))
    has, needs = (np.array(side) for side in zip(*(tokens[name] for name in chosen), strict=True))
    left.scatter(has, places, s=46, color=COLOURS["compute"], label="tokens that a GPU has", zorder=3)
    left.scatter(needs, places, s=170, marker="|", color=palette.PREDICTED, linewidths=2.4, label="that ZeRO-3 needs")
    left.hlines(places, has, needs, color=palette.OTHER, linewidth=1.2)
    left.set(xscale="log", xlabel="tokens of a GPU", xlim=(min(has.min(), needs.min()) / 2, None))
    ends = np.zeros(len(chosen))
    for name, (field, colour) in _DIMENSIONS.items():
        sizes = [getattr(layout, field) for layout, _ in chosen.values()]
        wide = np.log2(sizes)
        right.barh(places, wide, 0.58, left=ends, color=colour, edgecolor="white", label=name)
        for place, (size, begin, length) in enumerate(zip(sizes, ends, wide, strict=True)):
            if size > 1:
                style = {"ha": "center", "va": "center", "color": palette.ink_on(colour)}
                right.text(
                    begin + length / 2, place, f"{name[-1]} {size}" if size > 2 else name[-1] + str(size), **style
                )
        ends += wide
    for place, (end, (_, engine)) in enumerate(zip(ends, chosen.values(), strict=True)):
        right.annotate(engine, (end, place), (5, 0), textcoords="offset points", va="center")
    ticks = range(0, int(ends.max()) + 1, 3)
    right.set_xticks(list(ticks), [f"{2**tick:,}" for tick in ticks])
    right.set(xlabel="GPUs", xlim=(0, 1.3 * ends.max()))
    left.set_yticks(places, [",\n".join(name.rsplit(", ", 1)) for name in chosen])
    left.set_ylim(len(chosen) - 0.5, -0.5)
    for ax in (left, right):
        ax.grid(axis="y", visible=False)
    handles, labels = (
        [*a, *b] for a, b in zip(left.get_legend_handles_labels(), right.get_legend_handles_labels(), strict=True)
    )
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
    layouts_text = "; ".join(
        f"{name}: t {layout.tp}, p {layout.pp}, d {layout.dp}, {engine}" for name, (layout, engine) in chosen.items()
    )
    return save(fig, "hybrid_parallel_chosen", f"Layouts that the procedure chooses. {layouts_text}.")


def ways_to_cut(steps: Mapping[str, Mapping[str, float]]) -> Picture:
    """The parts of a step's seconds by the planner, for each way to cut a replica; wide parts have their number.

    Args:
        steps: way -> part of the step, by its name in the planner -> seconds.
    """
    bars = {name: {_PLANNED.get(part, part): value for part, value in parts.items()} for name, parts in steps.items()}
    fig, ax = new(size=(6.4, 0.5 * len(bars) + 1.9))
    ends = stacked(ax, bars, PARTS)
    for place, (parts, end) in enumerate(zip(bars.values(), ends, strict=True)):
        ax.annotate(f"{end:.0f} s", (end, place), (5, 0), textcoords="offset points", va="center")
        begin = 0.0
        for part in PARTS:
            value = parts.get(part, 0.0)
            if value > 0.05 * max(ends):
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                ax.text(begin + value / 2, place, f"{value:.0f}", ha="center", va="center", bbox=box)
            begin += value
    ax.set(xlabel="seconds of a step, by the planner", xlim=(0, 1.12 * max(ends)))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{name} {end:.0f} s, of them " + ", ".join(f"{part} {value:.1f}" for part, value in parts.items() if value)
        for (name, parts), end in zip(bars.items(), ends, strict=True)
    )
    return save(fig, "hybrid_parallel_cuts", f"Seconds of a step for each way to cut a copy in four: {values_text}.")
