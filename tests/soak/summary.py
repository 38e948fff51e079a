"""What became of the cases: a line for each that failed as soon as it has, how many there were, a table at the end."""

import re
import time
from collections import Counter
from dataclasses import dataclass, field

from pardemo.tables import text_table

from .case import Case
from .faults import FaultCase

#: So often a line says how far it is.
EVERY_S = 10.0
STATUSES = ("passed", "refused", "timed out", "failed")


@dataclass(frozen=True)
class Outcome:
    """A case, one of :data:`STATUSES`, what was said, and of a layout the worst error as a part of its bound."""

    case: Case | FaultCase
    status: str
    told: str = ""
    worst: float | None = None


@dataclass
class Summary:
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.status == "failed"]

    def note(self, one: Outcome) -> None:
        self.outcomes.append(one)
        if one.status == "failed":
            print(f"FAILED {one.case.kind}, case {one.case.number}: {one.told}\n       {one.case}", flush=True)
        if (now := time.monotonic()) - self.said >= EVERY_S:
            self.said = now
            counted = Counter(one.status for one in self.outcomes)
            told = ", ".join(f"{counted[status]} {status}" for status in STATUSES if counted[status])
            print(f"{now - self.begin:6.0f} s: {len(self.outcomes)} cases, {told}", flush=True)

    def show(self) -> None:
        kinds = list(dict.fromkeys(one.case.kind for one in self.outcomes))
        head = ("kind", "cases", *STATUSES, "closest to its bound")
        print(text_table([head, *(self._line(kind) for kind in kinds)]))
        for kind in kinds:
            said = Counter(
                _without_numbers(one.told) for one in self._of(kind) if one.status in ("refused", "timed out")
            )
            for text, times in said.most_common():
                print(f"{kind}: {times} × {text}")
        print(f"{len(self.outcomes)} cases in {time.monotonic() - self.begin:.0f} s, seed {self.seed}; "
              f"{len(self.failed)} failed")  # fmt: skip
        for one in self.failed:
            print(f"  python -m tests.soak --only '{one.case.kind}' --case {one.case.number} --seed {self.seed}")

    def _of(self, kind: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.case.kind == kind]

    def _line(self, kind: str) -> tuple[str, ...]:
        own = self._of(kind)
        counted = Counter(one.status for one in own)
        ratios = [one.worst for one in own if one.status == "passed" and one.worst is not None]
        closest = f"{max(ratios):.2g}" if ratios else ""
        return (kind, str(len(own)), *(str(counted[status] or "") for status in STATUSES), closest)


def _without_numbers(text: str) -> str:
    """Messages that differ in ranks and sizes alone are one."""
    return re.sub(r"\d+", "#", text)[:200]
