"""Scores of several answers on several groups of rows, with their intervals."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from pardemo.draw import palette

_SHADES = (*palette.KNOWN, palette.NEW)  # what is known in greys; what is new in colour


def scores(
    ax: Axes,
    values: Mapping[str, Sequence[float]],
    intervals: Mapping[str, Sequence[Sequence[float]]],
    groups: Sequence[str],
) -> None:
    """A cluster of bars for each answer, one for each of three groups, with the interval as a whisker and the value.

    Args:
        values: answer -> a score by group. intervals: answer -> ``[low, high]`` by group.
    """
    places, width = np.arange(len(values)), 0.8 / len(groups)
    for index, (group, shade) in enumerate(zip(groups, _SHADES, strict=True)):
        heights = np.array([row[index] for row in values.values()])
        ends = np.array([row[index] for row in intervals.values()])
        reach = [heights - ends[:, 0], ends[:, 1] - heights]
        at = places + (index - (len(groups) - 1) / 2) * width
        whisker = {"elinewidth": 1, "ecolor": "black"}
        ax.bar(at, heights, width * 0.9, color=shade, yerr=reach, capsize=2.5, error_kw=whisker, label=group, zorder=2)
        for x, height, end in zip(at, heights, ends[:, 1], strict=True):
            style = {"textcoords": "offset points", "ha": "center", "size": 10}
            ax.annotate(f"{height:.0f}", (x, max(height, end)), (0, 3), **style)
    ax.set_xticks(places, list(values))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper center", ncols=len(groups), fontsize=10)
