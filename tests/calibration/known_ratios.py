"""Writes ``known_ratios.json`` of :mod:`pardemo.planner.layouts.intervals` anew."""

import json
from collections import defaultdict
from collections.abc import Iterable

from pardemo import project
from pardemo.planner.layouts.intervals import FINE_TUNES, RATIOS, kinds
from pardemo.planner.layouts.memory import peak
from pardemo.planner.layouts.published import against, finetune_runs
from pardemo.planner.layouts.published.against import ComparedRun
from pardemo.planner.layouts.step import step

Ratios = dict[str, dict[str, list[float]]]


def ratios(timed: Iterable[ComparedRun], held: Iterable[ComparedRun] = ()) -> Ratios:
    """Known over predicted by the narrowest kind: seconds of the runs ``timed``, bytes of those that ``held`` them."""
    found: Ratios = {"seconds": defaultdict(list), "bytes": defaultdict(list)}
    for what, outcomes in (("seconds", timed), ("bytes", held)):
        for outcome in outcomes:
            error = outcome.error if what == "seconds" else outcome.memory_error
            if error is not None:
                found[what][kinds(outcome.run.job, outcome.run.layout)[0]].append(round(1 / (1 + error), 3))
    return {what: {name: sorted(values) for name, values in sorted(of.items())} for what, of in found.items()}


def kept_back() -> tuple[list[ComparedRun], list[ComparedRun]]:
    """The runs of the published tables that no constant was fitted to: those with a time, those with their memory."""
    files = sorted(path.name for path in against.FOLDER.glob("*.csv"))
    timed, held = ([one for file in files for one in against.halves(file, what)[1]] for what in ("time", "memory"))
    return timed, held


def of_all() -> Ratios:
    """The ratios of all kinds of runs that no constant was fitted to, layouts' and fine-tunes'."""
    found = ratios(*kept_back())
    judged = finetune_runs.halves(list(finetune_runs.read(finetune_runs.folder() / "finetunes.csv")))[1]
    timed = [run.seconds / step(run.job, run.layout).seconds for run in judged if run.seconds]
    held = [run.peak_gb * 1e9 / peak(run.job, run.layout).peak_bytes for run in judged if run.peak_gb]
    for what, known in (("seconds", timed), ("bytes", held)):
        found[what][FINE_TUNES] = sorted(round(ratio, 3) for ratio in known)
    return found


if __name__ == "__main__":
    text = json.dumps(of_all(), indent=0) + "\n"
    project.write_atomically(RATIOS, lambda target: target.write_text(text, encoding="utf-8"))
