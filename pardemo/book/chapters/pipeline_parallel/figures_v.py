"""A picture of *Pipeline parallelism*: how long DualPipeV is idle, by its timetables and by two published formulas."""

from collections.abc import Mapping

from pardemo.book.chapters.pipeline_parallel.figures import WIDE
from pardemo.draw.style import COLOURS, Picture, new, save

Idle = Mapping[str, Mapping[int, float]]  # name -> p -> idle time
_MARKS, _DASHES = "os", ("-", "--")


def two_bubbles(panels: Mapping[str, tuple[Idle, Idle]]) -> Picture:
    """The last rank's idle time against p: points are timetables, lines formulas; a panel for each kind of times.

    Args:
        panels: title -> (timetable -> p -> idle time, formula -> p -> idle time), in forward passes of a chunk; two of
            each, in one order: a formula's line and the points of the timetable that it is for.
    """
    fig, axes = new(len(panels), 1, size=(WIDE, 2.5 * len(panels) + 1.0), sharex=True, squeeze=False)
    said = []
    for ax, (title, (timetables, formulas)) in zip(axes.flat, panels.items(), strict=True):
        for (name, idle), dash in zip(formulas.items(), _DASHES, strict=True):
            ax.plot(list(idle), list(idle.values()), dash, color=COLOURS["predicted"], linewidth=1.6, label=name)
        for (name, idle), mark, fill in zip(timetables.items(), _MARKS, (COLOURS["backward"], "none"), strict=True):
            style = {"markerfacecolor": fill, "markeredgecolor": COLOURS["backward"], "markersize": 8}
            ax.plot(list(idle), list(idle.values()), mark, linestyle="none", label=name, **style)
        ax.set(title=title, ylabel="idle time, in F", ylim=(0, None))
        ranks = max(next(iter(timetables.values())))
        rows = [*timetables.items(), *formulas.items()]
        said.append(f"{title}: with p = {ranks} " + ", ".join(f"{name} {idle[ranks]:.1f}" for name, idle in rows))
    axes[-1, 0].set_xlabel("ranks p")
    axes[-1, 0].set_xticks(list(next(iter(timetables.values()))))
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=1)
    return save(fig, "pipeline_parallel_two_bubbles", f"Idle time of the last rank of DualPipeV. {'; '.join(said)}.")
