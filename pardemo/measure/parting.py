"""The calls of all ranks side by side: where they part, and which ranks can never go on."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pardemo.measure.journal import Log, Logged

#: Collectives whose tensors have as many elements on all ranks; of the others each rank may have its own. A root that
#: scatters or gathers has all parts, and the others have theirs.
EVEN = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce")


@dataclass(frozen=True)
class Wait:
    """A rank waits in a call for others, for ``since_s`` seconds now: they have not begun it, or are in another one."""

    rank: int
    call: Logged
    waits_for: tuple[int, ...]
    since_s: float


@dataclass(frozen=True)
class First:
    """The first call at which ranks part, by what each of them does there: its own call, or None if it has none."""

    number: int
    ranks: tuple[int, ...]
    calls: dict[int, Logged | None]

    @property
    def differ(self) -> bool:
        """Whether ranks that have come to it do different things, or give tensors that do not fit."""
        return len({_agreed(call) for call in self.calls.values() if call is not None}) > 1


def stuck(logs: Mapping[int, Log]) -> list[int]:
    """Ranks that can never go on, if those that have begun a call that is not over wait in it.

    Such a rank waits for one that has ended, that is in another call of the same group, or that can never go on either.
    Ranks that compute are none of these: whoever waits for them alone is not stuck.
    """
    return sorted(Book(logs).stuck())


class Book:
    """The calls of all ranks by their groups: what stands beside what."""

    def __init__(self, logs: Mapping[int, Log]):
        self.logs = logs
        self.groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Logged]]] = defaultdict(lambda: defaultdict(list))
        for rank, log in logs.items():
            for call in log.calls:
                self.groups[call.group, call.ranks][rank].append(call)

    def waits(self, at_s: float) -> list[Wait]:
        """Of each rank its first call that others have not come to, or are in another one of."""
        made = []
        for rank, log in sorted(self.logs.items()):
            for call in log.waiting:
                if absent := self.absent(rank, call):
                    until_s = at_s if call.end_s is None else call.end_s
                    made.append(Wait(rank, call, tuple(absent), max(until_s - call.begin_s, 0.0)))
                    break
        return made

    def ended(self) -> set[int]:
        return {rank for rank, log in self.logs.items() if log.ended}

    def absent(self, rank: int, call: Logged) -> list[int]:
        """Ranks that a call waits for: they have not begun it, or do something else instead."""
        of_ranks = self.groups[call.group, call.ranks]
        if call.ranks[0] < 0:  # a message of any rank
            return [other for other in self.logs if other != rank]
        needed = call.shape if call.kind == "new_group" else call.ranks  # a group is made by its own ranks
        absent = [
            other for other in needed if other != rank and len(of_ranks.get(other, ())) <= call.number
        ]  # fmt: skip
        if absent or call.message:
            return absent
        before = [self._differ(of_ranks, number, False) for number in range(call.number + 1)]
        parts = next((number for number, differ in enumerate(before) if differ), None)
        if parts is None:
            return []
        own = _agreed(of_ranks[rank][parts])
        return [other for other in needed if other in of_ranks and _agreed(of_ranks[other][parts]) != own]

    def stuck(self) -> set[int]:
        """Ranks all of whose calls that are not over wait for ranks that will not come."""
        never = self.ended()
        stuck = {rank for rank, log in self.logs.items() if log.waiting and not log.ended}
        while True:
            left = {rank for rank in stuck if self._never(rank, stuck | never)}
            if left == stuck:
                return stuck
            stuck = left

    def _never(self, rank: int, gone: set[int]) -> bool:
        """Whether no call of a rank can get over without one of those who are gone."""
        calls = [call for call in self.logs[rank].waiting if not self._taken(rank, call)]
        absent = [self.absent(rank, call) for call in calls]
        if any(call.ranks[0] < 0 and not set(some) <= gone for call, some in zip(calls, absent, strict=True)):
            return False
        return bool(calls) and all(set(some) & gone for some in absent)

    def _taken(self, rank: int, call: Logged) -> bool:
        """Whether a message has been taken at its other end: who does not wait for it does not see that."""
        if not call.message:
            return False
        for other, calls in self.groups[call.group, call.ranks].items():
            if other != rank and len(calls) > call.number and calls[call.number].state == "over":
                return True
        return False

    def first(self, loosely: bool) -> First | None:
        """The earliest call at which the ranks of a group part, or that some of them have not come to.

        ``loosely``: also where the calls fit and the places do not: another line, module, or step.
        """
        candidates: list[tuple[float, First]] = []
        for (_, ranks), of_ranks in self.groups.items():
            number = self._parts(of_ranks, loosely)
            if number is None:
                continue
            members = [rank for rank in dict.fromkeys([*of_ranks, *ranks]) if rank in self.logs]
            calls = {rank: of_ranks[rank][number] if len(of_ranks.get(rank, ())) > number else None for rank in
                     sorted(members)}  # fmt: skip
            begun = min(call.begin_s for call in calls.values() if call)
            candidates.append((begun, First(number, ranks, calls)))
        return min(candidates, key=lambda one: one[0])[1] if candidates else None

    def _parts(self, of_ranks: dict[int, list[Logged]], loosely: bool) -> int | None:
        most = max(len(calls) for calls in of_ranks.values())
        for number in range(most):
            if self._differ(of_ranks, number, loosely):
                return number
            for rank, calls in of_ranks.items():
                if len(calls) > number and calls[number].state != "over" and self.absent(rank, calls[number]):
                    return number
        return None

    def _differ(self, of_ranks: dict[int, list[Logged]], number: int, loosely: bool) -> bool:
        """Whether ranks that have come to a call do different things there."""
        calls = {rank: own[number] for rank, own in of_ranks.items() if len(own) > number}
        if len({_agreed(call) for call in calls.values()}) > 1:
            return True
        if not loosely or any(call.message for call in calls.values()):
            return False
        if len({call.step for call in calls.values()}) > 1:
            return True
        # another place: a parting only where one rank is where the other is at another time. Ranks that call from
        # lines of their own, as the two branches of a condition, do so each time.
        places = {rank: {_place(call) for call in own} for rank, own in of_ranks.items()}
        return any(
            _place(one) != _place(other) and (_place(one) in places[b] or _place(other) in places[a])
            for a, one in calls.items()
            for b, other in calls.items()
        )


def _agreed(call: Logged) -> tuple:
    """What a call has to have in common with those of the other ranks."""
    if call.message:
        return "message", call.nbytes
    if call.kind == "all-gather":  # sizes of what each gives
        return call.kind, call.nbytes, call.dtype, prod(call.shape)
    if call.kind == "new_group":
        return call.kind, call.shape
    return (call.kind, call.nbytes, call.dtype) if call.kind in EVEN else (call.kind,)


def _place(call: Logged) -> tuple[str, str]:
    return call.line, call.module
