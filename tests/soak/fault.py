"""What a fault is, and how one is drawn."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch.distributed as dist


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
    way, that goes before. A fault ``may_time_out`` where no rank can know more than that another one does not come.
    """

    run: Callable[[FaultCase], object]
    ways: tuple[str, ...]
    trainers: tuple[str, ...]
    says: str
    by_way: dict[str, str]
    may_time_out: bool

    def expected(self, case: FaultCase) -> re.Pattern:
        return re.compile(self.by_way.get(case.how, self.says).format(who=case.who))


FAULTS: dict[str, Fault] = {}


def fault(kind: str, says: str, ways=("",), trainers=("",), by_way=None, may_time_out: bool = False):
    def note(run: Callable[[FaultCase], object]):
        FAULTS[kind] = Fault(run, tuple(ways), tuple(trainers), says, by_way or {}, may_time_out)
        return run

    return note


def draw_fault(kind: str, number: int, seed: int, folder: str = "") -> FaultCase:
    """Case ``number`` of a kind: ways and engines in turn, so that few cases see all of them; the rest by chance."""
    chance, found = Random(f"{seed} {kind} {number}"), FAULTS[kind]
    pairs = [(how, trainer) for how in found.ways for trainer in found.trainers]
    Random(f"{seed} {kind}").shuffle(pairs)
    how, trainer = pairs[number % len(pairs)]
    ranks = chance.choice((2, 2, 3, 4)) if trainer != "tp" else chance.choice((2, 4))
    return FaultCase(kind, number, seed, how, trainer, ranks, chance.randrange(ranks), chance.randrange(3), folder)
