"""Charts of predicted steps: beside thousands of published runs, and part by part."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pardemo import extras
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

with extras.needed_by(__name__):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR = 0.15  # the band around equal
FEW = 60  # points of a source that are drawn large
MARKERS = "o^sDvPX"
#: Colours of the sources: there are more sources than light colours of ranks that can be seen as a point.
POINTS = (*palette.WAYS.values(), palette.COMPUTED, palette.DONE["communication"], palette.KEPT["activations"])


def predicted_and_known(outcomes: Sequence[Any]) -> Figure:
    """Seconds of a step, predicted over known, one point for each run; the band is ± 15 %.

    ``outcomes``: of :func:`pardemo.planner.layouts.published.against.compare`; those without a time, and those that
    contradict themselves, are left out.
    """
    groups = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is not None and not outcome.run.wrong:
            groups[outcome.run.publisher].append(outcome)
    fig, ax = new(size=(6.2, 5.0))
    shown = [outcome for group in groups.values() for outcome in group]
    low = 0.7 * min(min(outcome.run.seconds, outcome.step.seconds) for outcome in shown)
    high = 1.4 * max(max(outcome.run.seconds, outcome.step.seconds) for outcome in shown)
    ends = [low, high]
    ax.fill_between(ends, [(1 - NEAR) * x for x in ends], [(1 + NEAR) * x for x in ends], color=palette.GRID, zorder=0)
    ax.plot(ends, ends, color=palette.PREDICTED, linewidth=1, zorder=1)
    # the largest first, and small ones as large points with an edge, or those of many would hide them
    for place, (source, group) in enumerate(sorted(groups.items(), key=lambda item: -len(item[1]))):
        colour, marker = POINTS[place % len(POINTS)], MARKERS[place % len(MARKERS)]
        published, predicted = [outcome.run.seconds for outcome in group], [outcome.step.seconds for outcome in group]
        few = len(group) < FEW
        ax.scatter(
            published, predicted, s=40 if few else 12, marker=marker, color=colour, alpha=0.95 if few else 0.6,
            edgecolors="white" if few else "none", linewidths=0.6 if few else 0, label=source, zorder=2 + few,
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ax.set(xlabel="known seconds a step", ylabel="predicted seconds a step")
    legend = ax.legend(loc="upper left")
    for handle in legend.legend_handles:
        handle.set_sizes([40])
    return fig


_COMPUTE, _SENT, _WAIT = COLOURS["compute"], COLOURS["communication"], COLOURS["wait"]


#: The planner's parts of a step: blue computes, orange talks, grey waits.
PARTS = {
    "matrix multiplications": (_COMPUTE, ""),
    "attention": (_COMPUTE, "///"),
    "memory bandwidth": (_COMPUTE, "..."),
    "launching kernels": (_WAIT, "///"),
    "pipeline bubble": (_WAIT, ""),
    "tensor-parallel traffic": (_SENT, ""),
    "context-parallel traffic": (_SENT, "---"),
    "expert-parallel traffic": (_SENT, "+++"),
    "pipeline messages": (_SENT, "///"),
    "data-parallel traffic": (_SENT, "xxx"),
    "optimizer": (COLOURS["optimizer states"], ""),
}


#: The planner's lines of a GPU's memory.
LINES = {**palette.KEPT, **palette.SHADES, "program": palette.OTHER}


def stacked(ax: Axes, bars: Mapping[str, Mapping[str, float]], styles: Mapping[str, tuple[str, str]]) -> list[float]:
    """Bars of ``name -> part -> value`` from the top down; how long each is. The parts appear in the legend."""
    places, ends = np.arange(len(bars)), np.zeros(len(bars))
    most = max(sum(parts.values()) for parts in bars.values())
    for part, (colour, hatch) in styles.items():
        values = np.array([parts.get(part, 0.0) for parts in bars.values()])
        visible = values.max() > 0.004 * most  # less is narrower than its white edge
        edge: dict[str, Any] = {"edgecolor": "white", "hatch": hatch, "label": part} if visible else {"linewidth": 0}
        ax.barh(places, values, 0.6, left=ends, color=colour, **edge)
        ends += values
    ax.set_yticks(places, list(bars))
    ax.set_ylim(len(bars) - 0.45, -0.55)
    ax.grid(axis="y", visible=False)
    return list(ends)


def seconds_of_layouts(
    steps: Mapping[str, Mapping[str, float]],
    published: Mapping[str, float] | None = None,
    name: str = "which_layout_layouts",
) -> Picture:
    """Where each layout's step goes, part by part, in seconds; a diamond is the ``published`` time."""
    published = published or {}
    fig, ax = new(size=(6.4, 0.55 * len(steps) + 2.3))
    ends = stacked(ax, steps, PARTS)
    top = max(*ends, *published.values())
    for place, (case, end) in enumerate(zip(steps, ends, strict=True)):
        diamond = published.get(case, 0.0)
        far = diamond if end < diamond < end + 0.14 * top else end  # beside the bar, and not on the diamond
        away = 9 if 0 < diamond <= far else 4  # room for the diamond, or none where it lies behind the number
        ax.annotate(f"{end:.3g} s", (far, place), (away, 0), textcoords="offset points", va="center")
    diamonds = [(seconds, list(steps).index(case)) for case, seconds in published.items()]
    if diamonds:
        ax.scatter(*zip(*diamonds, strict=True), s=52, marker="D", color=palette.PREDICTED, zorder=3, label="published")
    ax.set(xlabel="seconds a step; bars and numbers are predicted", xlim=(0, 1.14 * top))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    description = "; ".join(
        f"{case} {end:.2f} s, mostly {max(steps[case], key=lambda part: steps[case][part])}"
        + (f", published {published[case]:.2f} s" if case in published else "")
        for case, end in zip(steps, ends, strict=True)
    )
    return save(fig, name, f"Predicted seconds of a step: {description}.".replace("\n", " "))
