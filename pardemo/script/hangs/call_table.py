"""Aligns the collectives that ranks have logged: which ranks are deadlocked, and at which call they first differ."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pardemo.script.hangs.journal import Log, LoggedCall

#: Collectives whose tensors have as many elements on all ranks; of the others each rank may have its own. A root that
#: scatters or gathers has all parts, and the others have theirs.
EVEN = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce")


@dataclass(frozen=True)
class BlockedCall:
    """A rank's wait of ``since_s`` seconds for other ranks, which have not begun its call or are in another one."""

    rank: int
    call: LoggedCall
    waits_for: tuple[int, ...]
    since_s: float


@dataclass(frozen=True)
class Mismatch:
    """The first call that differs between ranks: for each rank its own, or None if it has none there."""

    number: int
    ranks: tuple[int, ...]
    calls: dict[int, LoggedCall | None]

    @property
    def differ(self) -> bool:
        """Whether ranks that have come to it do different things, or give tensors that do not fit."""
        return len({_agreement_key(call) for call in self.calls.values() if call is not None}) > 1


def deadlocked_ranks(logs: Mapping[int, Log]) -> list[int]:
    """Finds ranks that can never go on, on the assumption that each waits in its open calls.

    Such a rank waits for one that has ended, that is in another call of the same group, or that can never go on either.
    Ranks that compute are none of these: whoever waits for them alone is not stuck.
    """
    return sorted(CallTable(logs).deadlocked())


class CallTable:
    """Aligns the calls of all ranks, group by group."""

    def __init__(self, logs: Mapping[int, Log]):
        self.logs = logs
        self.groups: dict[tuple[str, tuple[int, ...]], dict[int, list[LoggedCall]]] = defaultdict(dict)
        for rank, log in logs.items():
            for call in log.calls:
                self.groups[call.group_key].setdefault(rank, []).append(call)

    def waits(self, at_s: float) -> list[BlockedCall]:
        """Returns each rank's first call that other ranks have not begun, or in whose place they are in another."""
        blocked = []
        for rank, log in sorted(self.logs.items()):
            for call in log.waiting:
                if absent := self.absent(rank, call):
                    until_s = at_s if call.end_s is None else call.end_s
                    blocked.append(BlockedCall(rank, call, tuple(absent), max(until_s - call.begin_s, 0.0)))
                    break
        return blocked

    def ended(self) -> set[int]:
        return {rank for rank, log in self.logs.items() if log.ended}

    def absent(self, rank: int, call: LoggedCall) -> list[int]:
        """Returns the ranks that a call waits for: they have not begun it, or do something else instead."""
        of_ranks = self.groups[call.group_key]
        if call.ranks[0] < 0:  # a message of any rank
            return [other for other in self.logs if other != rank]
        needed = call.shape if call.kind == "new_group" else call.ranks  # a group is made by its own ranks
        absent = [other for other in needed if other != rank and len(of_ranks.get(other, ())) <= call.number]
        if absent or call.message:
            return absent
        before = [self._differ(of_ranks, number, False) for number in range(call.number + 1)]
        parts = next((number for number, differ in enumerate(before) if differ), None)
        if parts is None:
            return []
        key = _agreement_key(of_ranks[rank][parts])
        return [other for other in needed if other in of_ranks and _agreement_key(of_ranks[other][parts]) != key]

    def deadlocked(self) -> set[int]:
        """Returns the ranks all of whose open calls wait for ranks that will never begin them."""
        never = self.ended()
        stuck = {rank for rank, log in self.logs.items() if log.waiting and not log.ended}
        while True:
            remaining = {rank for rank in stuck if self._never(rank, stuck | never)}
            if remaining == stuck:
                return stuck
            stuck = remaining

    def _never(self, rank: int, lost: set[int]) -> bool:
        """Whether every open call of a rank needs one of the ranks that begin no more calls."""
        calls = [call for call in self.logs[rank].waiting if not self._taken(rank, call)]
        absent = [self.absent(rank, call) for call in calls]
        if any(call.ranks[0] < 0 and not set(awaited) <= lost for call, awaited in zip(calls, absent, strict=True)):
            return False
        return bool(calls) and all(set(awaited) & lost for awaited in absent)

    def _taken(self, rank: int, call: LoggedCall) -> bool:
        """Whether the other end has taken a message; its own rank sees that only if it waits for it."""
        if not call.message:
            return False
        number, of_ranks = call.number, self.groups[call.group_key]
        return any(
            other != rank and len(calls) > number and calls[number].state == "over" for other, calls in of_ranks.items()
        )

    def first(self, loosely: bool) -> Mismatch | None:
        """Returns the earliest call in which the ranks of a group differ, or which some of them have not begun.

        ``loosely``: also where the calls fit and the places do not: another line, module, or step.
        """
        candidates: list[tuple[float, Mismatch]] = []
        for (_, ranks), of_ranks in self.groups.items():
            number = self._parts(of_ranks, loosely)
            if number is None:
                continue
            calls = {
                rank: of_ranks[rank][number] if len(of_ranks.get(rank, ())) > number else None
                for rank in sorted({*of_ranks, *ranks} & self.logs.keys())
            }
            begun = min(call.begin_s for call in calls.values() if call)
            candidates.append((begun, Mismatch(number, ranks, calls)))
        return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None

    def _parts(self, of_ranks: dict[int, list[LoggedCall]], loosely: bool) -> int | None:
        most = max(len(calls) for calls in of_ranks.values())
        for number in range(most):
            if self._differ(of_ranks, number, loosely):
                return number
            for rank, calls in of_ranks.items():
                if len(calls) > number and calls[number].state != "over" and self.absent(rank, calls[number]):
                    return number
        return None

    def _differ(self, of_ranks: dict[int, list[LoggedCall]], number: int, loosely: bool) -> bool:
        """Whether ranks that have come to a call do different things there."""
        calls = {rank: calls_of_rank[number] for rank, calls_of_rank in of_ranks.items() if len(calls_of_rank) > number}
        if len({_agreement_key(call) for call in calls.values()}) > 1:
            return True
        if not loosely or any(call.message for call in calls.values()):
            return False
        if len({call.step for call in calls.values()}) > 1:
            return True
        # another place: a mismatch only where one rank is where the other is at another time. Ranks that call from
        # lines of their own, as the two branches of a condition, do so each time.
        places = {rank: {_line_and_module(call) for call in calls_of_rank} for rank, calls_of_rank in of_ranks.items()}
        return any(
            _line_and_module(call) != _line_and_module(other)
            and (_line_and_module(call) in places[b] or _line_and_module(other) in places[a])
            for a, call in calls.items()
            for b, other in calls.items()
        )


def _agreement_key(call: LoggedCall) -> tuple:
    """Returns what a call must have in common with those of the other ranks."""
    if call.message:
        return "message", call.nbytes
    if call.kind == "all-gather":  # sizes of what each gives
        return call.kind, call.nbytes, call.dtype, prod(call.shape)
    if call.kind == "new_group":
        return call.kind, call.shape
    return (call.kind, call.nbytes, call.dtype) if call.kind in EVEN else (call.kind,)


def _line_and_module(call: LoggedCall) -> tuple[str, str]:
    return call.line, call.module
