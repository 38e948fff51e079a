"""Pictures of *Pipelines without bubbles*: DualPipeV's idle time, counted and by the two published formulas."""

from collections.abc import Mapping

from pardemo.book.chapters.pipeline_parallel.figures import WIDE, courses, held_by_schedule
from pardemo.draw.charts import curves, key, words
from pardemo.draw.style import Picture, new, save

__all__ = ["courses", "held_by_schedule", "two_bubbles"]

Idle = Mapping[str, Mapping[int, float]]  # name -> p -> idle time


def two_bubbles(panels: Mapping[str, tuple[Idle, Idle]]) -> Picture:
    """The last rank's idle time against p: points are timetables, lines formulas; a panel for each kind of times.

    Args:
        panels: title -> (timetable -> p -> idle time, formula -> p -> idle time), in forward passes of a chunk; two of
            each, in one order: a formula's line and the points of the timetable that it is for.
    """
    fig, axes = new(len(panels), 1, size=(WIDE, 2.5 * len(panels) + 1.0), sharex=True, squeeze=False)
    sentences = []
    for ax, (title, (timetables, formulas)) in zip(axes.flat, panels.items(), strict=True):
        curves(ax, formulas, colours=["predicted"])
        for (name, idle), mark, filled in zip(timetables.items(), "os", ("full", "none"), strict=True):
            points = {"colours": ["backward"], "dashes": ["none"], "marks": mark, "markersize": 8, "fillstyle": filled}
            curves(ax, {name: idle}, **points)
        ax.set(title=title, ylabel="idle time, in F", ylim=(0, None))
        ranks = max(next(iter(timetables.values())))
        last = words({name: idle[ranks] for name, idle in (timetables | formulas).items()}, "{:.1f}")
        sentences.append(f"{title}: with p = {ranks} {last}")
    axes[-1, 0].set_xlabel("ranks p")
    axes[-1, 0].set_xticks(list(next(iter(timetables.values()))))
    key(fig, ncols=1)
    return save(
        fig, "pipelines_without_bubbles_formulas", f"Idle time of the last rank of DualPipeV. {'; '.join(sentences)}."
    )
