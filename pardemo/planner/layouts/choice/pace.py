"""Corrects predictions by runs on the very machine: one factor for its time, and by how much to trust the rest."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.price.step import step
from pardemo.planner.layouts.published.runs import PublishedRun


def correct(job: Job, runs: Sequence[PublishedRun]) -> tuple[Job, str]:
    """The job at the pace of ``runs``: the median of what they took over what is predicted of them; and a line on it.

    Raises:
        ValueError: none of them has a time on the job's GPU and with its program.
    """
    wanted = _where(job)
    timed = [run for run in runs if run.seconds and not run.wrong and _where(run.job) == wanted]
    if not timed:
        others = sorted({_where(run.job) for run in runs if run.seconds})
        told = ", ".join(others) or "none that has a time"
        raise ValueError(f"--measured has no run with a time on {wanted}; it has {told}")
    ratios = sorted(run.seconds / step(run.job, run.layout).seconds for run in timed if run.seconds)
    pace = statistics.median(ratios)
    line = f"{len(ratios)} measured run{'s' * (len(ratios) > 1)} took {pace:.2f} times as long as predicted"
    if len(ratios) > 1:
        rest = max(abs(ratio / pace - 1) for ratio in ratios)
        line += f" ({ratios[0]:.2f} to {ratios[-1]:.2f}), so all times are multiplied by it; they themselves are then "
        line += f"up to {100 * rest:.0f} % off"
    else:
        line += ", so all times are multiplied by it; one run does not tell how far the rest is off"
    return replace(job, pace=pace, measured=True), line


def _where(job: Job) -> str:
    return f"{job.machine.gpu.name} with {job.stack.name}"
