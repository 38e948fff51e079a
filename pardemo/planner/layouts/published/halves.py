"""Which published runs a program's constants are fitted to, and which are kept back to judge them: every second one."""

from collections.abc import Sequence

from pardemo import project
from pardemo.planner.layouts.published.against import LEAST_MFU, ComparedRun, compare, usable
from pardemo.planner.layouts.published.published import load

FEW = 50  # runs of which none can be kept back
FOLDER = project.root() / "data" / "published_runs"
Halves = tuple[Sequence[ComparedRun], Sequence[ComparedRun]]


def of_time(file: str) -> Halves:
    """Of a table's runs that computed: those whose step time was fitted, and those that were kept back."""
    return _halves(usable(compare(load(FOLDER / file)), LEAST_MFU))


def of_memory(file: str) -> Halves:
    """The same of runs whose memory is published."""
    outcomes = compare(load(FOLDER / file))
    return _halves([one for one in outcomes if one.memory_error is not None and not one.run.wrong])


def _halves(runs: list[ComparedRun]) -> Halves:
    return (runs[::2], runs[1::2]) if len(runs) >= FEW else (runs, [])
