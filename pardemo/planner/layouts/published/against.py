"""Compares predictions with published runs: errors of time and memory, and the layout that would have been chosen."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout, check
from pardemo.planner.layouts.price.memory import Memory, memory
from pardemo.planner.layouts.price.step import PredictedStep, idle_stages, step
from pardemo.planner.layouts.published.runs import PublishedRun

NEAR = 1.01  # layouts within 1 % of the quickest are as quick: then the one that takes least memory
#: Of the predicted time of a layout whose tensor parallelism leaves the host, what a choice reckons with: the median of
#: nanotron's runs of that kind took 1.26 times as long as predicted, of the others 1.02 times.
ACROSS = 1.25
#: The same of what else has gone wrong with a program, by name. Of nanotron's pipelines over hosts 67 runs had replicas
#: without ZeRO-1, and the median took 2.4 times as long; of the 398 others the median took as long as predicted, but
#: each third waited for messages. Replicas over hosts without ZeRO-1 took 1.05 times as long.
RECORDS = {"nanotron": {"TP": 1.35, "PP without ZeRO": 2.4, "PP": 1.1, "without ZeRO": 1.05}}
#: The fullest of nanotron's runs that ended well had reserved 97.8 % of an H100's memory: what is above does not run.
FULL = 0.98
LEAST_MFU = 0.05  # below it a run hardly computed: what it waited for is not in the model
RESERVE = 0.08  # of a GPU's memory, for fragments and what libraries take; nearer to its end allocators begin to thrash


@dataclass(frozen=True)
class ComparedRun:
    """A published run and what is predicted of it."""

    run: PublishedRun
    step: PredictedStep
    memory: Memory

    @property
    def error(self) -> float | None:
        """Predicted over published seconds, less 1; None where the run has no time."""
        return None if self.run.seconds is None else self.step.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over published peak bytes, less 1; None where the peak is not published."""
        return None if self.run.peak_bytes is None else self.memory.peak_bytes / self.run.peak_bytes - 1

    @property
    def refused(self) -> str:
        """Why the layout cannot be run at all, whatever it takes; "" where it can."""
        return why_not(self.run.job, self.run.layout)

    @property
    def fits(self) -> bool:
        """Whether it is predicted to run: it can be cut so, and no GPU holds more than it has."""
        return self.memory.peak_bytes <= FULL * self.run.job.machine.gpu.memory_bytes and not self.refused

    @property
    def has_room(self) -> bool:
        """Whether a plan may choose it: it runs, and a GPU keeps what a plan leaves free."""
        return self.fits and self.memory.peak_bytes <= room(self.run.job)

    @property
    def known_mfu(self) -> float | None:
        """MFU by the published time; None where the run has no time."""
        if self.run.seconds is None:
            return None
        return self.step.model_flops / self.run.seconds / self.step.gpus / self.step.peak_flops


def room(job: Job) -> float:
    """Bytes of a GPU that a plan may fill."""
    return job.machine.gpu.memory_bytes * (1 - RESERVE)


def why_not(job: Job, layout: Layout) -> str:
    """Why a layout cannot have run: a cut that is impossible, or a stage that is left with nothing; "" where it can."""
    try:
        check(layout, job.shape, layout.gpus, job.sequence, job.stack.ends_as_layers)
    except ValueError as error:
        return str(error)
    if idle := idle_stages(job, layout):
        return f"{job.stack.name} leaves {idle} of PP {layout.pp} stages without anything; take fewer"
    return ""


def compare(runs: Iterable[PublishedRun]) -> list[ComparedRun]:
    """Each run with what is predicted of it."""
    return [ComparedRun(run, step(run.job, run.layout), memory(run.job, run.layout)) for run in runs]


def usable(outcomes: Iterable[ComparedRun], least_mfu: float = 0.0) -> list[ComparedRun]:
    """The runs whose time can be true; those below ``least_mfu``, which hardly computed, are left out."""
    return [
        outcome
        for outcome in outcomes
        if outcome.error is not None and not outcome.run.wrong and outcome.known_mfu >= least_mfu
    ]


def errors(values: Sequence[float]) -> dict[str, Any]:
    """Number of errors, mean and median of their sizes, their median with its sign (bias), the share within 15 %."""
    if not values:
        return {"runs": 0}
    sizes = [abs(value) for value in values]
    return {
        "runs": len(values), "mean": statistics.fmean(sizes), "median": statistics.median(sizes),
        "bias": statistics.median(values), "within 15 %": sum(size <= 0.15 for size in sizes) / len(sizes),
    }  # fmt: skip


#: What errors are grouped by: a name, and a run's value of it.
BY: dict[str, Callable[[PublishedRun], Hashable]] = {
    "source": lambda run: run.publisher,
    "TP": lambda run: run.layout.tp,
    "PP": lambda run: run.layout.pp,
    "hosts": lambda run: run.job.machine.hosts,
    "micro-batch": lambda run: run.layout.micro_batch,
}


def by(outcomes: Sequence[ComparedRun], key: str) -> dict[Hashable, dict[str, Any]]:
    """:func:`errors` of time for each value of one of :data:`BY`."""
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[BY[key](outcome.run)].append(outcome.error)
    return {value: errors(groups[value]) for value in sorted(groups)}


@dataclass(frozen=True)
class Choice:
    """The run that would have been chosen among those of one job, and the best one; ``correlation`` of their orders."""

    job: str
    runs: int
    chosen: ComparedRun
    best: ComparedRun
    correlation: float | None

    @property
    def regret(self) -> float:
        """The chosen layout's published time over the best one's, less 1."""
        return self.chosen.run.seconds / self.best.run.seconds - 1


def expected(job: Job, layout: Layout, seconds: float) -> float:
    """Seconds to choose by: the predicted ones, times what layouts of a kind that has gone wrong have taken more."""
    record = RECORDS.get(job.stack.name, {})
    across = job.machine.crossings(layout.pp, layout.tp * layout.cp * layout.dp) > 0
    replicas = layout.sharding == "none" and layout.replicas > 1 and layout.gpus > job.machine.host_gpus
    if not job.machine.inside(layout.tp):
        seconds *= record.get("TP", ACROSS)
    if across:
        return seconds * record.get("PP without ZeRO" if replicas else "PP", 1.0)
    return seconds * (record.get("without ZeRO", 1.0) if replicas else 1.0)


def choose(outcomes: Sequence[ComparedRun]) -> ComparedRun:
    """The quickest of those with room (of all, if none has); of those within 1 %, the one with the least memory."""
    fitting = {id(outcome): outcome for outcome in outcomes if outcome.has_room} or {
        id(outcome): outcome for outcome in outcomes
    }
    seconds = {
        key: expected(outcome.run.job, outcome.run.layout, outcome.step.seconds) for key, outcome in fitting.items()
    }
    quickest = min(seconds.values())
    near = [outcome for key, outcome in fitting.items() if seconds[key] <= NEAR * quickest]
    return min(near, key=lambda outcome: outcome.memory.peak_bytes)


def jobs(outcomes: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Groups of runs with one model, machine, number of GPUs and samples of a step; only those of several layouts."""
    groups = defaultdict(list)
    for outcome in usable(outcomes):
        run = outcome.run
        groups[
            run.source, run.job.shape.name, run.job.shape.layers, run.job.machine.gpu.name, run.layout.gpus,
            run.layout.batch, run.job.sequence,
        ].append(outcome)  # fmt: skip
    return [group for group in groups.values() if len(group) > 1]


def choices(outcomes: Sequence[ComparedRun]) -> list[Choice]:
    """A choice for each of :func:`jobs`."""
    per_job = []
    for group in jobs(outcomes):
        first = group[0].run
        name = first.job.shape.name
        job = f"{name}, {first.layout.gpus} × {first.job.machine.gpu.name}, {first.layout.batch} samples"
        best = min(group, key=lambda outcome: outcome.run.seconds)
        per_job.append(Choice(job, len(group), choose(group), best, rank_correlation(group)))
    return per_job


def rank_correlation(outcomes: Sequence[ComparedRun]) -> float | None:
    """Spearman's, of predicted and published seconds: 1 where both have the same order. Equal seconds share a rank.

    None where all predicted or all published seconds are the same: then there is no order to compare with.
    """
    from scipy.stats import spearmanr

    predicted, published = [outcome.step.seconds for outcome in outcomes], [outcome.run.seconds for outcome in outcomes]
    if len(set(predicted)) == 1 or len(set(published)) == 1:
        return None
    return float(spearmanr(predicted, published).statistic)


def confusion(outcomes: Iterable[ComparedRun]) -> dict[tuple[str, bool], int]:
    """Runs by outcome and by whether they are predicted to fit. What failed may have had other reasons than memory."""
    counts: dict[tuple[str, bool], int] = defaultdict(int)
    for outcome in outcomes:
        counts[outcome.run.outcome, outcome.fits] += 1
    return dict(counts)
