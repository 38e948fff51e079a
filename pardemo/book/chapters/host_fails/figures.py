"""Pictures of *When a host fails*: failures by GPUs, goodput by interval, what a save holds up, restarts, resumes."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch

from pardemo.book.chapters.host_fails.restarts import Restart
from pardemo.draw import palette
from pardemo.draw.charts import measured, predicted
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.formulas import failures
from pardemo.meters.timeline import Span

HOUR = 3600.0


def hours_between_failures(published: Mapping[int, float], of_one_s: float) -> Picture:
    """Hours between failures over the number of GPUs: the law as a line, published runs as points.

    Args:
        published: GPUs -> seconds between failures. of_one_s: seconds between the failures of one GPU and what is
            around it.
    """
    fig, ax = new(size=(6.4, 3.4))
    gpus = [8 * 2**power for power in range(15)]
    predicted(ax, gpus, [failures.between_failures(of_one_s, n) / HOUR for n in gpus], "one GPU's / N")
    measured(ax, list(published), [seconds / HOUR for seconds in published.values()], "Llama 3 405B, 54 days")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([8, 64, 512, 4096, 32768], ["8", "64", "512", "4,096", "32,768"])
    ax.set_yticks([1, 24, 24 * 30], ["an hour", "a day", "a month"])
    ax.minorticks_off()
    ax.set(xlabel="GPUs", ylabel="between two failures")
    ax.legend(loc="upper right")
    told = ", ".join(f"{n:,}: {seconds / HOUR:.1f}" for n, seconds in published.items())
    return save(fig, "host_fails_between", f"Hours between failures by GPUs; published {told}; the line is 1/N.")


def goodput_by_interval(
    points: Mapping[float, float], save_s: float, between_s: float, restart_s: float, name: str = "measured"
) -> Picture:
    """The share of time that counts, over the interval: the law as a line, measurements as points, and what is lost.

    Args:
        points: seconds of an interval -> measured share. save_s, between_s, restart_s: as in
            :func:`pardemo.formulas.failures.goodput`.
    """
    fig, ax = new(size=(6.4, 3.8))
    least, most = min(points) / 1.5, max(points) * 1.5
    grid = [least * (most / least) ** (k / 80) for k in range(81)]
    law = [failures.goodput(interval, save_s, between_s, restart_s) for interval in grid]
    lost = [failures.lost_shares(interval, save_s, between_s, restart_s) for interval in grid]
    predicted(ax, grid, law, "the law")
    ax.plot(grid, [1 - of.saves for of in lost], color=COLOURS["communication"], linestyle="--", label="saves alone")
    ax.plot(grid, [1 - of.repeated for of in lost], color=COLOURS["fails"], linestyle="-.", label="repeated work alone")
    measured(ax, list(points), list(points.values()), name)
    best = failures.young_interval(save_s, between_s)
    ax.axvline(best, color=palette.OTHER, linestyle=":", label=f"Young's interval: {best:.2g} s")
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(points), [f"{interval:.2g}" for interval in points])
    ax.minorticks_off()
    ax.set(xlabel="seconds of training between two saves", ylabel="goodput", ylim=(0, 1.02), xlim=(least, most))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    told = ", ".join(f"{interval:.2g} s: {share:.2f}" for interval, share in points.items())
    return save(fig, "host_fails_goodput", f"Goodput by interval, {name}: {told}; Young's interval is {best:.2g} s.")


def held_up(ways: Mapping[str, Sequence[Span]]) -> Picture:
    """Steps over time, once for each way to save: what trains above, and what the training waits for and writes below.

    Args:
        ways: way -> spans of the kinds ``compute`` (a step), ``wait`` (the training stands), ``send`` (a file is
            written beside it).
    """
    fig, axes = new(len(ways), 1, size=(6.4, 1.1 + 1.0 * len(ways)), sharex=True)
    rows, told = {"compute": 0.0, "wait": 0.0, "send": 0.4}, []
    for ax, (way, spans) in zip(axes, ways.items(), strict=True):
        begin = min(span.begin_s for span in spans)
        for span in spans:
            ax.broken_barh(
                [(1e3 * (span.begin_s - begin), 1e3 * (span.end_s - span.begin_s))], (rows[span.kind], 0.36),
                facecolor=COLOURS[span.kind], hatch="..." if span.kind == "wait" else "", edgecolor="white",
            )  # fmt: skip
        waited = sum(span.end_s - span.begin_s for span in spans if span.kind == "wait")
        told.append(f"{way}: {1e3 * waited:.0f} ms")
        ax.set(ylim=(0.8, -0.05), yticks=[0.18, 0.58], yticklabels=["training", "writing"])
        ax.set_title(f"{way}: the training waits {1e3 * waited:.0f} ms in all")
        ax.grid(axis="y", visible=False)
    axes[-1].set_xlabel("milliseconds")
    handles = [
        Patch(facecolor=COLOURS["compute"], label="a step"),
        Patch(facecolor=COLOURS["wait"], hatch="...", edgecolor="white", label="the training waits"),
        Patch(facecolor=COLOURS["send"], label="a file is written"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return save(fig, "host_fails_held_up", f"What the training waits for, for each way to save: {'; '.join(told)}.")


def resumed_without(losses: Mapping[str, Sequence[float]], whole: Sequence[float], first: int) -> Picture:
    """The losses of resumes that went wrong, each beside those of the training that was not stopped.

    Args:
        losses: what was wrong -> the losses after the resume, from step ``first`` on. whole: those of the training
            that was not stopped, from the same step on.
    """
    fig, axes = new(-(-(len(losses) + 1) // 2), 2, size=(6.4, 1.8 * (len(losses) // 2 + 1)), sharex=True, sharey=True)
    told = []
    for ax, (wrong, values) in zip(axes.flat, losses.items(), strict=False):
        steps = range(first, first + len(values))
        ax.plot(steps, whole, color=COLOURS["predicted"], linewidth=1, label="not stopped")
        ax.plot(steps, values, color=COLOURS["fails"], linestyle="--", label="resumed")
        ax.set_title(wrong, fontsize="medium")
        ax.set_xlabel("step")
        ax.tick_params(labelbottom=True)
        told.append(f"{wrong} {max(abs(a - b) for a, b in zip(values, whole, strict=True)):.1g}")
    for ax in axes[:, 0]:
        ax.set_ylabel("loss")
    spare = axes.flat[len(losses)]
    spare.set_axis_off()
    spare.legend(*axes.flat[0].get_legend_handles_labels(), loc="center")
    return save(fig, "host_fails_resumed", f"Losses after a resume; largest differences: {', '.join(told)}.")


def survivor(seconds: Sequence[float], groups: Sequence[int]) -> Picture:
    """How long each step of the surviving group took, and how many groups its gradients came from."""
    fig, ax = new(size=(6.4, 3.0))
    colours = {1: palette.OTHER, 2: COLOURS["compute"]}
    for step, (took, count) in enumerate(zip(seconds, groups, strict=True)):
        ax.bar(step, 1e3 * took, 0.86, color=colours[count], hatch="//" if count == 1 else "", edgecolor="white")
    ax.set(xlabel="step of the survivor", ylabel="milliseconds", xlim=(-0.6, len(seconds) - 0.4))
    ax.grid(axis="x", visible=False)
    handles = [
        Patch(facecolor=colours[2], label="gradients of both groups"),
        Patch(facecolor=colours[1], hatch="//", edgecolor="white", label="of one group alone"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    alone = sum(count == 1 for count in groups)
    told = f"{alone} of {len(groups)} steps with one group alone; the longest step took {1e3 * max(seconds):.0f} ms."
    return save(fig, "host_fails_survivor", f"Steps of the survivor: {told}")


def restarts_in_parts(restarts: Mapping[str, Restart]) -> Picture:
    """The seconds without training of each restart, in their parts: agents, Python, ranks.

    Args:
        restarts: what happened -> the restart after it.
    """
    fig, ax = new(size=(6.4, 1.5 + 0.45 * len(restarts)))
    parts = {
        "the agents see it, and meet": ("agents_s", COLOURS["wait"], "..."),
        "Python starts, and loads torch": ("python_s", palette.OTHER, ""),
        "ranks meet, read, train a step": ("ranks_s", COLOURS["compute"], "//"),
    }
    told = []
    for row, (what, restart) in enumerate(restarts.items()):
        left = 0.0
        for name, colour, hatch in parts.values():
            seconds = getattr(restart, name)
            ax.barh(row, seconds, 0.6, left, color=colour, hatch=hatch, edgecolor="white")
            left += seconds
        ax.text(left, row, f"  {left:.1f} s", va="center")
        told.append(f"{what}: {restart.agents_s:.1f} + {restart.python_s:.1f} + {restart.ranks_s:.1f} s")
    longest = max(restart.seconds for restart in restarts.values())
    ax.set(xlabel="seconds without training", yticks=range(len(restarts)), yticklabels=list(restarts))
    ax.set(xlim=(0, 1.15 * longest), ylim=(len(restarts) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)
        for label, (_, colour, hatch) in parts.items()
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=1)
    return save(fig, "host_fails_restarts", f"Restarts in agents, Python, ranks: {'; '.join(told)}.")
