"""What a fault of a rank is, and how a function becomes one."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import torch.distributed as dist

MARK = "fault of a rank"
Run = TypeVar("Run", bound=Callable[..., object])


@dataclass(frozen=True)
class FaultCase:
    """A drawn fault: ``how`` is one of the kind's ways, ``who`` the rank to blame, ``when`` the step."""

    kind: str
    number: int
    seed: int
    how: str
    trainer: str
    ranks: int
    who: int
    when: int
    folder: str = ""

    @property
    def mine(self) -> bool:
        return dist.get_rank() == self.who

    def __str__(self) -> str:
        return f"{self.how}, {self.trainer or 'no engine'}, rank {self.who} of {self.ranks}, step {self.when}"


@dataclass(frozen=True)
class Fault:
    """How a kind of fault is drawn, run and judged.

    ``says`` is what the first line of the error has to match; {who} is the rank to blame, and where ``by_way`` has the
    way, that goes before. Where no rank can know more than that another one does not come, the run may end at its limit
    instead, with a first line, or a stack of that rank, that matches ``at_limit``.
    """

    kind: str
    run: Callable[[FaultCase], object]
    ways: tuple[str, ...]
    trainers: tuple[str, ...]
    says: str
    by_way: dict[str, str]
    at_limit: str | None

    def is_told(self, case: FaultCase, line: str) -> bool:
        """Whether the first line of an error says what this fault has to say."""
        return bool(re.search(self.by_way.get(case.how, self.says).format(who=case.who), line))

    def may_end_at_limit(self, case: FaultCase, line: str, stack: str) -> bool:
        """Whether a run may have ended at its time limit, with this first line and stack of the rank to blame."""
        text = f"{line}\n{stack}"
        return self.at_limit is not None and bool(re.search(self.at_limit.format(who=case.who), text))


def fault(
    kind: str,
    says: str,
    ways: Iterable[str] = ("",),
    trainers: Iterable[str] = ("",),
    by_way: dict[str, str] | None = None,
    at_limit: str | None = None,
) -> Callable[[Run], Run]:
    """Marks a function as what the ranks run for a kind of fault; :func:`faults_of` finds it in its module."""

    def mark(run: Run) -> Run:
        run.__dict__[MARK] = Fault(kind, run, tuple(ways), tuple(trainers), says, by_way or {}, at_limit)
        return run

    return mark


def faults_of(module: ModuleType) -> dict[str, Fault]:
    """The kinds of fault of a module, by name, in the order in which they stand there."""
    marked = (getattr(value, MARK, None) for value in vars(module).values())
    return {each.kind: each for each in marked if isinstance(each, Fault)}
