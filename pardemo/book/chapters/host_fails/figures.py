"""Pictures of *When a host fails*: failures by GPUs, goodput by interval, what a save holds up, restarts, resumes."""

from collections.abc import Mapping, Sequence

from pardemo.book.chapters.host_fails.restarts import Restart
from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, curves, key, lanes, log, words
from pardemo.draw.style import Picture, new, save
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
    law = {n: failures.between_failures(of_one_s, n) for n in gpus}
    looks = {"colours": ("predicted", "ring"), "dashes": ("-", "none"), "marks": ("", "o"), "markersize": 7.5}
    curves(ax, {"one GPU's / N": law, "Llama 3 405B, 54 days": published}, per=HOUR, **looks)
    log(ax, x=gpus[::3], y={1: "an hour", 24: "a day", 24 * 30: "a month"})
    ax.set(xlabel="GPUs", ylabel="between two failures")
    ax.legend(loc="upper right")
    summary = words(published, "{:.1f}", per=HOUR)
    return save(fig, "host_fails_between", f"Hours between failures by GPUs; published {summary}; the line is 1/N.")


def goodput_by_interval(points: Mapping[float, float], save_s: float, between_s: float, restart_s: float) -> Picture:
    """The share of time that counts, over the interval: the law as a line, measurements as points, and what is lost.

    Args:
        points: seconds of an interval -> measured share. save_s, between_s, restart_s: as in
            :func:`pardemo.formulas.failures.goodput`.
    """
    fig, ax = new(size=(6.4, 3.8))
    least, most = min(points) / 1.5, max(points) * 1.5
    grid = [least * (most / least) ** (k / 80) for k in range(81)]
    lost = {interval: failures.lost_shares(interval, save_s, between_s, restart_s) for interval in grid}
    lines = {
        "the law": {interval: failures.goodput(interval, save_s, between_s, restart_s) for interval in grid},
        "saves alone": {interval: 1 - shares.saves for interval, shares in lost.items()},
        "repeated work alone": {interval: 1 - shares.repeated for interval, shares in lost.items()},
    }
    curves(ax, lines, colours=("predicted", "communication", "fails"), dashes=("-", "--", "-."))
    curves(ax, {"measured": points}, colours=["ring"], dashes=["none"], marks="o", markersize=7.5)
    best = failures.young_interval(save_s, between_s)
    ax.axvline(best, color=palette.OTHER, linestyle=":", label=f"Young's interval: {best:.2g} s")
    log(ax, x={interval: f"{interval:.2g}" for interval in points})
    ax.set(xlabel="seconds of training between two saves", ylabel="goodput", ylim=(0, 1.02), xlim=(least, most))
    key(fig)
    summary = ", ".join(f"{interval:.2g} s: {share:.2f}" for interval, share in points.items())
    alt = f"Goodput by interval, measured: {summary}; Young's interval is {best:.2g} s."
    return save(fig, "host_fails_goodput", alt)


def held_up(ways: Mapping[str, Sequence[Span]]) -> Picture:
    """Steps over time, once for each way to save: what trains above, and what the training waits for and writes below.

    Args:
        ways: way -> spans of the kinds ``compute`` (a step), ``wait`` (the training stands), ``send`` (a file is
            written beside it).
    """
    fig, axes = new(len(ways), 1, size=(6.4, 1.1 + 1.0 * len(ways)), sharex=True)
    labels = {"compute": "a step", "wait": "the training waits", "send": "a file is written"}
    fills, waited_s = {label: kind for kind, label in labels.items()}, {}
    for ax, (way, spans) in zip(axes, ways.items(), strict=True):
        begin = min(span.begin_s for span in spans)
        rows: dict[str, list] = {"training": [], "writing": []}
        for span in spans:
            box = 1e3 * (span.begin_s - begin), 1e3 * (span.end_s - begin), labels[span.kind]
            rows["writing" if span.kind == "send" else "training"].append(box)
        lanes(ax, rows, fills)
        waited_s[way] = sum(span.end_s - span.begin_s for span in spans if span.kind == "wait")
        ax.set_title(f"{way}: the training waits {1e3 * waited_s[way]:.0f} ms in all")
    axes[-1].set_xlabel("milliseconds")
    key(fig, ncols=3)
    waited = "; ".join(f"{way}: {1e3 * seconds:.0f} ms" for way, seconds in waited_s.items())
    return save(fig, "host_fails_held_up", f"What the training waits for, for each way to save: {waited}.")


def resumed_without(losses: Mapping[str, Sequence[float]], whole: Sequence[float], first: int) -> Picture:
    """The losses of resumes that went wrong, each beside those of the training that was not stopped.

    Args:
        losses: what was wrong -> the losses after the resume, from step ``first`` on. whole: those of the training
            that was not stopped, from the same step on.
    """
    fig, axes = new(-(-(len(losses) + 1) // 2), 2, size=(6.4, 1.8 * (len(losses) // 2 + 1)), sharex=True, sharey=True)
    summaries = []
    for ax, (wrong, values) in zip(axes.flat, losses.items(), strict=False):
        lines = {"not stopped": dict(enumerate(whole, first)), "resumed": dict(enumerate(values, first))}
        curves(ax, lines, colours=("predicted", "fails"), linewidth=1.4)
        ax.set_title(wrong, fontsize="medium")
        ax.set_xlabel("step")
        ax.tick_params(labelbottom=True)
        summaries.append(f"{wrong} {max(abs(a - b) for a, b in zip(values, whole, strict=True)):.1g}")
    for ax in axes[:, 0]:
        ax.set_ylabel("loss")
    spare = axes.flat[len(losses)]
    spare.set_axis_off()
    spare.legend(*axes.flat[0].get_legend_handles_labels(), loc="center")
    return save(fig, "host_fails_resumed", f"Losses after a resume; largest differences: {', '.join(summaries)}.")


def restarts_in_parts(restarts: Mapping[str, Restart]) -> Picture:
    """The seconds without training of each restart, in their parts: agents, Python, ranks.

    Args:
        restarts: what happened -> the restart after it.
    """
    parts = {
        "the agents see it, and meet": ("agents_s", "wait"),
        "Python starts, and loads torch": ("python_s", palette.OTHER),
        "ranks meet, read, train a step": ("ranks_s", ("compute", "//")),
    }
    series = {
        part: {restart_name: getattr(restart, field) for restart_name, restart in restarts.items()}
        for part, (field, _) in parts.items()
    }
    return bar_chart(
        "host_fails_restarts", f"Restarts in agents, Python, ranks: {words(series, '{:.1f} s')}.",
        {"seconds without training": {"series": series}}, across=True, stacked=True, text="{:.1f} s", ncols=1,
        fills={part: look for part, (_, look) in parts.items()},
    )  # fmt: skip
