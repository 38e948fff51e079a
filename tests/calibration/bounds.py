"""The least error that any planner can have on published runs: a table's columns do not say all that time depends on.

Both bounds are generous: they are fitted to the very rows that they judge, and only arithmetic is taken as known.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pardemo.planner.layouts.published.against import ComparedRun, choices, usable

STATES = ("parameters", "gradients", "optimizer states", "program")
FEWEST = 3  # rows of a model, TP and PP from which its own constant is worth something


@dataclass(frozen=True)
class Floor:
    """The least mean error, of so many rows, with so many constants fitted to them."""

    error: float
    rows: int
    constants: int


@dataclass(frozen=True)
class Twins:
    """Pairs of runs that differ in ZeRO 0 or 1 alone.

    Args:
        pairs: how many. apart: of how many the known times are further apart than predicted, by a factor of two and
            more. error: the least mean error of any prediction that has the difference between the two right.
    """

    pairs: int
    apart: int
    error: float


@dataclass(frozen=True)
class Sizes:
    """Predictions times a factor for each width, TP and micro-batch, learned from models of other depths.

    Args:
        errors: mean error, without and with it. mean_regrets, worst_regrets: of the choices, without and with it.
        factors: how many.
    """

    errors: tuple[float, float]
    mean_regrets: tuple[float, float]
    worst_regrets: tuple[float, float]
    factors: int


def memory(outcomes: Iterable[ComparedRun], least_tp: int = 1) -> Floor:
    """The least error of memory if each model, TP and PP had a constant of its own: bytes of a micro-batch's sample.

    States are computed as planned. Activations and logits grow with the micro-batch while a pipeline is full, so runs
    that agree in model, TP and PP have one unknown constant. Here it is the one with the least error.
    """
    groups = defaultdict(list)
    for outcome in outcomes:
        run = outcome.run
        full = run.layout.accumulation >= run.layout.pp and run.layout.tp >= least_tp
        if run.peak_bytes and not run.wrong and full:
            groups[run.job.shape.name, run.layout.tp, run.layout.pp].append(outcome)
    missed, rows = 0.0, 0
    large_groups = [group for group in groups.values() if len(group) >= FEWEST]
    for group in large_groups:
        peaks = np.array([outcome.run.peak_bytes for outcome in group])
        states = np.array([sum(outcome.memory.lines[line] for line in STATES) for outcome in group])
        samples = np.array([outcome.run.layout.micro_batch for outcome in group], float)
        each = (peaks - states) / samples  # the best constant meets one of the rows
        missed += min((np.abs(states + slope * samples - peaks) / peaks).sum() for slope in each)
        rows += len(group)
    return Floor(missed / rows, rows, len(large_groups))


def twins(outcomes: Iterable[ComparedRun], least_mfu: float = 0.0) -> Twins:
    """How far apart the times of runs are that differ in ZeRO 0 or 1 alone, with equal products and messages."""
    groups: dict[tuple, dict[str, ComparedRun]] = defaultdict(dict)
    for outcome in usable(outcomes, least_mfu):
        run = outcome.run
        groups[run.source, run.job.shape.name, str(run.layout.but(sharding="none"))][run.layout.sharding] = outcome
    ratios = [_apart(pair["none"], pair["zero1"]) for pair in groups.values() if {"none", "zero1"} <= pair.keys()]
    # with the predicted ratio, one of the two is met and the other is missed by what they are apart
    return Twins(len(ratios), sum(ratio >= 2 for ratio in ratios), _mean([(1 - 1 / ratio) / 2 for ratio in ratios]))


def sizes(outcomes: Iterable[ComparedRun], least_mfu: float = 0.0) -> Sizes:
    """The errors that remain if it were known how long kernels of each size take.

    Products of one width, TP and micro-batch have one size in models of any depth. So the factor by which a model's
    runs are missed is taken from the models of other depths; it holds what a smooth rule for products, launches and
    exchanges does not know of single kernels.
    """
    usable_runs = usable(outcomes, least_mfu)
    logs: dict[tuple, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for outcome in usable_runs:
        logs[_size(outcome)][outcome.run.job.shape.layers].append(math.log(outcome.step.seconds / outcome.run.seconds))
    learned = []
    for outcome in usable_runs:
        others = [
            log
            for depth, values in logs[_size(outcome)].items()
            if depth != outcome.run.job.shape.layers
            for log in values
        ]
        factor = math.exp(-statistics.median(others)) if others else 1.0
        step = replace(outcome.step, parts={name: seconds * factor for name, seconds in outcome.step.parts.items()})
        learned.append(replace(outcome, step=step))
    results = [
        ([abs(outcome.error) for outcome in compared], [choice.regret for choice in choices(compared)])
        for compared in (usable_runs, learned)
    ]
    errors, regrets = zip(*results, strict=True)
    return Sizes(tuple(map(_mean, errors)), tuple(map(_mean, regrets)), tuple(map(max, regrets)), len(logs))


def _size(outcome: ComparedRun) -> tuple:
    run = outcome.run
    return run.source, run.job.shape.hidden, run.layout.tp, run.layout.micro_batch


def _apart(a: ComparedRun, b: ComparedRun) -> float:
    """How many times further apart than predicted two runs are; 1 where it is as predicted."""
    ratio = a.run.seconds / b.run.seconds / (a.step.seconds / b.step.seconds)
    return max(ratio, 1 / ratio)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
