"""A layout on a World: what became of it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pardemo import RankError, RankFailed, World
from pardemo.soak.layouts.case import Case
from pardemo.soak.layouts.training import train_and_compare, verdict

LAYOUT_LIMIT_S = 120.0  # a layout takes a tenth of a second; on a machine that does much else, seconds
#: What an engine may refuse instead of doing it right: what its message has to name, and where that is in place.
REFUSALS: Mapping[str, Callable[[Case], bool]] = {
    "re-?entrant": lambda case: case.checkpointing == "reentrant" and bool(case.engine),
    "use stage 1": lambda case: case.tied and case.pp > 1 and case.engine in ("zero2", "zero3"),
    "clip by the norm of its own": lambda case: case.is_zero and case.chunks > 1 and case.clip is not None,
}


class Worlds(Protocol):
    """Something that has a World of each size."""

    def __getitem__(self, size: int) -> World: ...


@dataclass(frozen=True)
class Outcome:
    """What became of a case. Status is ``passed``, ``refused``, ``timed out`` or ``failed``.

    ``told``: what its error says, or what is wrong. ``worst``: of a layout the largest error, as a part of its bound.
    """

    status: str
    told: str = ""
    worst: float | None = None


def run_layout(worlds: Worlds, case: Case) -> Outcome:
    """Trains a case on ranks: passed where it is what one process gets, refused as :data:`REFUSALS` allow it."""
    try:
        seen = worlds[case.ranks].run(train_and_compare, case, timeout_s=LAYOUT_LIMIT_S)
    except RankError as error:
        told = first_line(error)
        may = any(applies(case) and re.search(names, told) for names, applies in REFUSALS.items())
        return Outcome("refused" if may else "failed", told)
    wrong = verdict(seen)
    return Outcome("failed" if wrong else "passed", wrong or "", max(each.worst for each in seen))


def first_line(error: RankError) -> str:
    """What a reader sees first; of a rank's own error of several lines, as torch has them, all."""
    if isinstance(error, RankFailed):
        rank, failure = error.first
        return f"rank {rank}: {' '.join(failure.headline.split())}"
    return str(error).strip().splitlines()[0]
