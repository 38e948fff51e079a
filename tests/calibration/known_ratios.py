"""Writes ``known_ratios.json`` of :mod:`pardemo.planner.layouts.intervals` anew."""

import json
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from pardemo import project
from pardemo.planner.layouts import intervals
from pardemo.planner.layouts.fine_tune_memory import predict_peak
from pardemo.planner.layouts.intervals import COVERAGE, FINE_TUNES, RATIOS, kinds_of_runs, stage_hosts
from pardemo.planner.layouts.published import against, finetune_runs, loaders
from pardemo.planner.layouts.published.against import LEAST_MFU, ComparedRun
from pardemo.planner.layouts.step import predict_step

#: The published tables; in ``newer`` those of releases and machines after the book's.
TABLES = sorted(
    str(path.relative_to(against.FOLDER)) for place in ("", "newer/") for path in against.FOLDER.glob(f"{place}*.csv")
)
Ratios = dict[str, dict[str, list[float]]]


def ratios(timed: Iterable[ComparedRun], held: Iterable[ComparedRun] = ()) -> Ratios:
    """Known over predicted by the narrowest kind: seconds of the runs ``timed``, bytes of those that ``held`` them."""
    found: Ratios = {"seconds": defaultdict(list), "bytes": defaultdict(list)}
    for what, outcomes in (("seconds", timed), ("bytes", held)):
        for outcome in outcomes:
            error = outcome.error if what == "seconds" else outcome.memory_error
            if error is not None:
                found[what][kinds_of_runs(outcome.run.job, outcome.run.layout)[0]].append(round(1 / (1 + error), 3))
    return {what: {name: sorted(values) for name, values in sorted(of.items())} for what, of in found.items()}


def kept_back() -> tuple[list[ComparedRun], list[ComparedRun]]:
    """The runs of the published tables that no constant was fitted to: those with a time, those with their memory."""
    timed, held = ([one for file in TABLES for one in against.halves(file, what)[1]] for what in ("time", "memory"))
    return timed, held


def of_all() -> dict[str, Any]:
    """The ratios of all kinds of runs that no constant was fitted to, layouts' and fine-tunes'; and what goes beyond.

    ``faster a month``: of each program with releases, :func:`faster`; ``hosts``: of each program, :func:`hosts`.
    """
    found: dict[str, Any] = ratios(*kept_back())
    judged = finetune_runs.halves(list(finetune_runs.read_fine_tunes(finetune_runs.folder() / "finetunes.csv")))[1]
    timed = [run.seconds / predict_step(run.job, run.layout).seconds for run in judged if run.seconds]
    held = [run.peak_gb * 1e9 / predict_peak(run.job, run.layout).peak_bytes for run in judged if run.peak_gb]
    for what, known in (("seconds", timed), ("bytes", held)):
        found[what][FINE_TUNES] = sorted(round(ratio, 3) for ratio in known)
    found["faster a month"] = {"megatron-core": faster(found["seconds"])}
    found["hosts"] = hosts()
    return found


def faster(seconds: dict[str, list[float]]) -> float:
    """The least share of its time that a program may save a month for intervals of earlier constants to hold.

    That is, for four of five runs of each later release to lie in the interval, which goes down by so much a month.
    """
    gaps = defaultdict(list)
    for earlier, one in against.later_runs():
        program = one.run.job.program
        plain = intervals._interval(seconds, kinds_of_runs(one.run.job, one.run.layout), one.step.seconds, False)
        gaps[earlier.fitted_release, program.fitted_release, program.release].append(
            (one.run.seconds, plain, program.months_ahead)
        )
    for thousandth in range(500):
        rate = thousandth / 1000
        inside = [
            fmean(plain.low * (1 - rate) ** months <= known <= plain.high for known, plain, months in runs)
            for runs in gaps.values()
        ]
        if min(inside) >= COVERAGE:
            return rate
    raise ValueError("no rate makes the intervals of earlier constants hold for later releases")


def hosts() -> dict[str, list[int]]:
    """Of each program: hosts of its largest run that computed, and most that a stage's ranks were on."""
    found: dict[str, list[int]] = {}
    for file in TABLES:
        for one in against.usable(against.compare(loaders.load(against.FOLDER / file, left_out=[])), LEAST_MFU):
            job, layout = one.run.job, one.run.layout
            most = found.setdefault(job.program.name.removesuffix("-compiled"), [1, 1])
            most[:] = max(most[0], job.machine.hosts), max(most[1], stage_hosts(job, layout))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    text = json.dumps(of_all(), indent=0) + "\n"
    project.write_text(RATIOS, text)
