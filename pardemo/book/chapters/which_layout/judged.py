"""Compares published runs with the planner, as the claims of *Which layout?* need it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.published import against, loaders
from pardemo.planner.layouts.published.against import ComparedRun
from pardemo.planner.layouts.published.papers import PublishedTraining
from pardemo.planner.layouts.published.runs import PublishedRun, read
from pardemo.planner.layouts.step import predict_step

#: The mean error of time that was aimed at, by source; 10 % for all others.
TARGETS = {"nanotron": 0.15, "Megatron-DeepSpeed": 0.12}
#: What the page's text says of the tables.
TOLD = {"runs": 2772, "layouts": 122, "failed": 67, "too large": 62, "four times slower": 21}


def published_runs(folder: Path) -> list[PublishedRun]:
    """The rows of all tables in ``folder``."""
    tables = sorted(folder.glob("*.csv"))
    return [run for path in tables for run in (loaders.read(path) if loaders.knows(path) else read(path))]


def rows_of_kinds(outcomes: Sequence[ComparedRun], layouts: Sequence[ComparedRun]) -> dict[str, int]:
    """Counts all runs, and those of one job's ``layouts``, by the kinds that :data:`TOLD` has."""
    failed = [x for x in layouts if x.run.outcome != "ok"]
    seconds = [x.seconds for x in against.usable(layouts)]
    slow = sum(s > 4 * min(seconds) for s in seconds)
    counts = (len(outcomes), len(layouts), len(failed), sum(not x.fits for x in failed), slow)
    return dict(zip(TOLD, counts, strict=True))


def errors_by_source(timed: Iterable[ComparedRun]) -> tuple[dict[str, float], dict[str, float]]:
    """The targets, and the mean errors, of each source; nanotron's runs below 5 % MFU are left out."""
    counted = [x for x in timed if x.run.source != "nanotron" or (x.known_mfu or 0.0) >= against.LEAST_MFU]
    means = {source: errors["mean"] for source, errors in against.summary_by(counted, "source").items()}
    return {source: TARGETS.get(source, 0.10) for source in means}, means


def halves(folder: Path) -> dict[str, tuple[float, float, float]]:
    """Table -> mean error of the rows that constants were fitted to, of those kept back, and its standard error."""
    errors_by_table = {}
    for path in sorted(folder.glob("*.csv")):
        fitted, kept = ([x.error for x in half] for half in against.halves(path.name))
        if kept:  # of a table of few all were fitted
            means = (against.errors(half)["mean"] for half in (fitted, kept))
            errors_by_table[path.stem] = (*means, float(np.std(np.abs(kept)) / len(kept) ** 0.5))
    return errors_by_table


def larger_over_smaller(by_table: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    """Divides the larger by the smaller of the two means of each table of :func:`halves`."""
    return {table: max(means) / min(means) for table, (*means, _) in by_table.items()}


def rows_of_halves(
    by_table: Mapping[str, tuple[float, float, float]], timed: Iterable[ComparedRun]
) -> list[dict[str, str]]:
    """:func:`halves` as a table, and as its last row nanotron's runs with those that hardly computed."""
    rows = [
        {"table": name.replace("_", " "), "fitted": f"{fitted:.1%}", "kept back": f"{kept:.1%} ± {chance:.1%}"}
        for name, (fitted, kept, chance) in by_table.items()
    ]
    errors = against.errors(x.error for x in timed if x.run.source == "nanotron")
    every = f"all {errors['runs']} runs of nanotron"
    return [*rows, {"table": every, "fitted": f"{errors['mean']:.0%}", "kept back": ""}]


def of_both_models(trained: Iterable[PublishedTraining]) -> tuple[dict[tuple, float], dict[tuple, float]]:
    """(Model, GPUs) -> TFLOP/s of a GPU, predicted and printed."""
    cases = {(x.job.shape.name, x.layout.gpus): x for x in trained}
    return {case: x.predicted_tflops for case, x in cases.items()}, {case: x.tflops for case, x in cases.items()}


def regrets(
    planned: Mapping[str, Mapping[int, float]], printed: Mapping[str, Mapping[int, float]]
) -> dict[int, float]:  # fmt: skip
    """GPUs -> what the planner's choice would have cost: the better way's rate over the chosen one's, less 1."""
    lost = {}
    for gpus in (384, 768, 1536):
        reached = {way: rates[gpus] for way, rates in printed.items()}
        chosen = max(reached, key=lambda way: planned[way][gpus])
        lost[gpus] = max(reached.values()) / reached[chosen] - 1
    return lost


def zero3_over_pipeline(seconds: Mapping[str, Mapping[float, float]]) -> dict[float, float]:
    """Link -> a step's seconds with ZeRO-3 over those with a pipeline."""
    return {link: seconds["ZeRO-3"][link] / s for link, s in seconds["pipeline"].items()}


def without_hiding(
    seconds: Mapping[str, Mapping[float, float]], jobs: Mapping[float, Job], pipelines: Collection[Layout], above: float
) -> dict[float, float]:
    """Link faster than ``above`` -> the bound of ZeRO-3 over a pipeline, if nothing hid the traffic of tensor ranks."""
    bounds = {}
    for link, job in jobs.items():
        if link > above:
            bare = replace(job, program=job.program.but(tp_overlap=0))
            quickest = min(predict_step(bare, layout).seconds for layout in pipelines)
            bounds[link] = 1.05 * quickest / seconds["pipeline"][link]
    return bounds


def layouts_by_link(chosen: Mapping[str, Mapping[float, tuple[float, str]]], links: Iterable[float]) -> list[dict]:
    """A row for each link: the layouts that are taken with it."""
    return [{"GB/s": f"{link:g}", **{way: by_link[link][1] for way, by_link in chosen.items()}} for link in links]


def errors_with_experts(of_nvidia: Iterable[ComparedRun]) -> list[dict[str, Any]]:
    """A row for dense models and one for models with experts: runs, mean error, the share within 15 %."""
    sides: dict[str, list[float | None]] = {"dense": [], "experts": []}
    for x in of_nvidia:
        sides["experts" if x.run.job.shape.experts else "dense"].append(x.error)
    errors = {name: against.errors(some) for name, some in sides.items()}
    return [
        {"models": name, "runs": row["runs"], "mean": f"{row['mean']:.1%}", "within 15 %": f"{row['within 15 %']:.0%}"}
        for name, row in errors.items()
    ]


def experts_in_halves() -> dict[str, float]:
    """The mean error of models with experts, of the rows that constants were fitted to and of those kept back."""
    named_halves = zip(("fitted", "kept back"), against.halves("megatron_bridge.csv"), strict=True)
    routed = {name: [x.error for x in half if x.run.job.shape.experts] for name, half in named_halves}
    return {name: against.errors(errors)["mean"] for name, errors in routed.items()}


def two_releases(of_nvidia: Iterable[ComparedRun], first: ComparedRun) -> str:
    """Tokens a second of a GPU in a run of 25.11, and in 26.02.01's of the same model on as many H100s, in words."""
    gpus, shape = first.run.layout.gpus, first.run.job.shape
    same = (x for x in of_nvidia if x.run.job.shape == shape and x.run.layout.gpus == gpus)
    later = next(x for x in same if x.run.source.endswith("26.02.01"))
    was, now = (x.step.tokens / x.seconds / gpus for x in (first, later))
    return f"{gpus} H100: {was:,.0f} tokens/s a GPU, two releases later {now:,.0f}"


def seconds_on(runs: Iterable[ComparedRun], gpus: Collection[str]) -> tuple[dict[str, Mapping], dict[str, float]]:
    """GPU -> the parts of its predicted step, and the published seconds."""
    by_gpu = {x.run.job.machine.gpu.name: x for x in runs}
    return {gpu: by_gpu[gpu].step.parts for gpu in gpus}, {gpu: by_gpu[gpu].seconds for gpu in gpus}
