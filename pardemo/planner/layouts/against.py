"""Predictions beside runs whose outcome is known: errors of time and memory, what would have been chosen."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pardemo.planner.layouts.layout import Layout, check
from pardemo.planner.layouts.memory import Memory, memory
from pardemo.planner.layouts.runs import PublishedRun
from pardemo.planner.layouts.step import PredictedStep, idle_stages, step
from pardemo.planner.layouts.work import Job

NEAR = 1.01  # layouts within 1 % of the quickest are as quick: then the one that takes least memory
#: Of the predicted time of a layout whose tensor parallelism leaves the host, what a choice reckons with: the median of
#: nanotron's runs of that kind took 1.26 times as long as predicted, of the others 1.02 times.
ACROSS = 1.25
RESERVE = 0.08  # of a GPU's memory, for fragments and what libraries take; nearer to its end allocators begin to thrash


@dataclass(frozen=True)
class ComparedRun:
    """A run beside what is predicted of it."""

    run: PublishedRun
    step: PredictedStep
    memory: Memory

    @property
    def error(self) -> float | None:
        """Predicted over known seconds, less 1."""
        return None if self.run.seconds is None else self.step.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.run.peak_bytes is None else self.memory.peak_bytes / self.run.peak_bytes - 1

    @property
    def refused(self) -> str:
        """Why the layout cannot be run at all, whatever it takes; "" where it can."""
        return why_not(self.run.job, self.run.layout)

    @property
    def fits(self) -> bool:
        """Whether it is predicted to run: it can be cut so, and no GPU holds more than there is room for."""
        return self.memory.peak_bytes <= room(self.run.job) and not self.refused

    @property
    def known_mfu(self) -> float | None:
        if self.run.seconds is None:
            return None
        return self.step.model_flops / self.run.seconds / self.step.gpus / self.step.peak_flops


def room(job: Job) -> float:
    """Bytes of a GPU that a plan may fill."""
    return job.machine.gpu.memory_bytes * (1 - RESERVE)


def why_not(job: Job, layout: Layout) -> str:
    """Why a layout of a known run cannot have run: a cut that is impossible, or a stage that is left with nothing."""
    try:
        check(layout, job.shape, layout.gpus, job.sequence)
    except ValueError as error:
        return str(error)
    if idle := idle_stages(job, layout):
        return f"{job.stack.name} leaves {idle} of PP {layout.pp} stages without anything; take fewer"
    return ""


def compare(runs: Iterable[PublishedRun]) -> list[ComparedRun]:
    """Every run beside what is predicted of it."""
    return [ComparedRun(run, step(run.job, run.layout), memory(run.job, run.layout)) for run in runs]


def usable(outcomes: Iterable[ComparedRun], least_mfu: float = 0.0) -> list[ComparedRun]:
    """Those with a time that can be true; ``least_mfu`` leaves out the ones that hardly computed."""
    return [one for one in outcomes if one.error is not None and not one.run.wrong and one.known_mfu >= least_mfu]


def errors(values: Sequence[float]) -> dict[str, Any]:
    """Count, mean and median size, the middle, and the share within 15 %."""
    if not values:
        return {"runs": 0}
    sizes = [abs(value) for value in values]
    return {
        "runs": len(values), "mean": statistics.fmean(sizes), "median": statistics.median(sizes),
        "bias": statistics.median(values), "within 15 %": sum(size <= 0.15 for size in sizes) / len(sizes),
    }  # fmt: skip


#: What a summary is made by.
BY: dict[str, Callable[[PublishedRun], Hashable]] = {
    "source": lambda run: run.source,
    "TP": lambda run: run.layout.tp,
    "PP": lambda run: run.layout.pp,
    "hosts": lambda run: run.job.machine.hosts,
    "micro-batch": lambda run: run.layout.micro_batch,
}


def by(outcomes: Sequence[ComparedRun], what: str) -> dict[Hashable, dict[str, Any]]:
    """:func:`errors` of time for each value of one of :data:`BY`."""
    groups = defaultdict(list)
    for one in outcomes:
        groups[BY[what](one.run)].append(one.error)
    return {value: errors(groups[value]) for value in sorted(groups)}


@dataclass(frozen=True)
class Choice:
    """What would have been chosen among the runs of one job, and what was best; ``correlation`` of their order."""

    job: str
    runs: int
    chosen: ComparedRun
    best: ComparedRun
    correlation: float | None

    @property
    def regret(self) -> float:
        """The chosen layout's known time over the best one's, less 1."""
        return self.chosen.run.seconds / self.best.run.seconds - 1


def expected(job: Job, layout: Layout, seconds: float) -> float:
    """Seconds to choose by: predicted ones, and more where predictions are known to be too low."""
    return seconds if job.machine.inside(layout.tp) else ACROSS * seconds


def choose(outcomes: Sequence[ComparedRun]) -> ComparedRun:
    """The quickest of those that fit (of all, if none does); of those within 1 %, the one with the least memory."""
    fitting = {id(one): one for one in outcomes if one.fits} or {id(one): one for one in outcomes}
    seconds = {key: expected(one.run.job, one.run.layout, one.step.seconds) for key, one in fitting.items()}
    quickest = min(seconds.values())
    near = [one for key, one in fitting.items() if seconds[key] <= NEAR * quickest]
    return min(near, key=lambda one: one.memory.peak_bytes)


def jobs(outcomes: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Those of each model, machine, number of GPUs and samples of a step of which several layouts were run."""
    groups = defaultdict(list)
    for one in usable(outcomes):
        run = one.run
        groups[
            run.source, run.job.shape.name, run.job.shape.layers, run.job.machine.gpu.name, run.layout.gpus,
            run.layout.batch, run.job.sequence,
        ].append(one)  # fmt: skip
    return [group for group in groups.values() if len(group) > 1]


def choices(outcomes: Sequence[ComparedRun]) -> list[Choice]:
    """A choice for each of :func:`jobs`."""
    found = []
    for group in jobs(outcomes):
        first = group[0].run
        name = first.job.shape.name
        job = f"{name}, {first.layout.gpus} × {first.job.machine.gpu.name}, {first.layout.batch} samples"
        best = min(group, key=lambda one: one.run.seconds)
        found.append(Choice(job, len(group), choose(group), best, rank_correlation(group)))
    return found


def rank_correlation(outcomes: Sequence[ComparedRun]) -> float | None:
    """Spearman's, of predicted and known seconds: 1 where both have the same order. Equal seconds share a rank.

    None where all predicted or all known seconds are the same: then there is no order to compare with.
    """
    from scipy.stats import spearmanr

    predicted, known = [one.step.seconds for one in outcomes], [one.run.seconds for one in outcomes]
    if len(set(predicted)) == 1 or len(set(known)) == 1:
        return None
    return float(spearmanr(predicted, known).statistic)


def confusion(outcomes: Iterable[ComparedRun]) -> dict[tuple[str, bool], int]:
    """Runs by outcome and by whether they are predicted to fit. What failed may have had other reasons than memory."""
    found: dict[tuple[str, bool], int] = defaultdict(int)
    for one in outcomes:
        found[one.run.outcome, one.fits] += 1
    return dict(found)
