"""What is predicted of a step beside what was measured: thousands of published runs in one picture."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from pardemo.collection.drawings import key
from pardemo.collection.figures.style import new

NEAR = 0.15  # the band around equal
MARKERS = "o^sDvPX"
#: Of sources: there are more of them than of ranks' light colours that one sees as a point.
POINTS = (*key.WAYS.values(), key.COMPUTED, key.DONE["communication"], key.KEPT["activations"])


def predicted_and_known(outcomes: Sequence[Any]) -> Figure:
    """Seconds of a step, predicted over known, one point for each run; the band is ± 15 %.

    ``outcomes``: of ``pardemo.planner.layouts.against.compare``; those without a time, and those that contradict
    themselves, are left out.
    """
    groups = defaultdict(list)
    for one in outcomes:
        if one.error is not None and not one.run.wrong:
            groups[one.run.source].append(one)
    fig, ax = new(size=(6.2, 5.0))
    shown = [one for group in groups.values() for one in group]
    low = 0.7 * min(min(one.run.seconds, one.step.seconds) for one in shown)
    high = 1.4 * max(max(one.run.seconds, one.step.seconds) for one in shown)
    ends = [low, high]
    ax.fill_between(ends, [(1 - NEAR) * x for x in ends], [(1 + NEAR) * x for x in ends], color=key.GRID, zorder=0)
    ax.plot(ends, ends, color=key.PREDICTED, linewidth=1, zorder=1)
    # the largest first, or the others would lie below it
    for place, (source, group) in enumerate(sorted(groups.items(), key=lambda one: -len(one[1]))):
        colour, marker = POINTS[place % len(POINTS)], MARKERS[place % len(MARKERS)]
        known, found = [one.run.seconds for one in group], [one.step.seconds for one in group]
        ax.scatter(known, found, s=12, marker=marker, color=colour, alpha=0.6, linewidths=0, label=_short(source))
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ax.set(xlabel="known seconds a step", ylabel="predicted seconds a step")
    ax.legend(loc="upper left", markerscale=2)
    return fig


def _short(source: str) -> str:
    return source.split(",")[0]
