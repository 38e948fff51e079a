"""Finds which rank comes last to each collective of a job, and how long the others wait for it."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pardemo.script.hangs.journal import Log
from pardemo.script.hangs.standstill import Standstill, standstill_of
from pardemo.script.job_files.records import JobCall, JobRankRecord


@dataclass(frozen=True)
class LongestWait:
    """The longest wait of a rank in a collective. ``last``: the rank that came last; ``line``: where that rank was."""

    rank: int
    last: int
    seconds: float
    kind: str
    line: str


@dataclass
class Waits:
    """The waits in collectives that the files of several ranks have.

    Args:
        collectives: how many were matched. by_lengths: whether waits are differences between kernels' lengths, which
            need no common clock, or between the times of the calls, by the clocks of their nodes.
        last: by rank how often it came last. waited_s: seconds by rank and by the rank that was last.
        longest: the longest of them.
    """

    collectives: int
    by_lengths: bool
    last: Counter[int]
    waited_s: Mapping[int, Mapping[int, float]]
    longest: LongestWait | None

    def as_json(self) -> dict[str, Any]:
        """Returns the waits for JSON, with ranks as keys in text."""
        waited = {str(rank): {str(last): seconds for last, seconds in by.items()} for rank, by in self.waited_s.items()}
        last = {str(rank): times for rank, times in self.last.items()}
        return vars(self) | {"last": last, "waited_s": waited, "longest": self.longest and vars(self.longest)}


def find_waits(records: Mapping[int, JobRankRecord]) -> Waits | None:
    """Matches the collectives of ranks and sums their waits; None where no two ranks have the same collective.

    The kernels of one collective end together on all ranks, so that the shortest is the last comer's, and what another
    takes longer is its wait.
    """
    matched: dict[tuple[Any, ...], dict[int, JobCall]] = defaultdict(dict)
    for rank, record in records.items():
        for call in record.calls:
            if not call.message and (call.group or call.ranks):
                matched[call.key][rank] = call
    shared = [calls for calls in matched.values() if len(calls) > 1 and len({c.kind for c in calls.values()}) == 1]
    if not shared:
        return None
    timed = [calls for calls in shared if all(call.lasted_s is not None for call in calls.values())]
    shared, by_lengths = (timed, True) if timed else (shared, False)
    made = Waits(len(shared), by_lengths, Counter(), defaultdict(Counter), None)
    for calls in shared:
        came = {rank: -(call.lasted_s or 0.0) if by_lengths else call.begin_s for rank, call in calls.items()}
        last = max(came, key=lambda rank: came[rank])
        made.last[last] += 1
        for rank in came.keys() - {last}:
            seconds = came[last] - came[rank]
            made.waited_s[rank][last] += seconds  # type: ignore[index]
            if made.longest is None or seconds > made.longest.seconds:
                made.longest = LongestWait(rank, last, seconds, calls[rank].kind, calls[last].line)
    return made


def find_standstill(records: Mapping[int, JobRankRecord]) -> Standstill | None:
    """Reports who waits for whom, as ``measure`` does for a run that hangs; None where all calls are over.

    Recorders keep the last few thousand calls: those of a group count from the first that all have; and of messages,
    which the two ends number in ways of their own, only those that are not over.
    """
    if not any(call.state != "over" for record in records.values() for call in record.calls):
        return None
    first: dict[Any, int] = {}
    for record in records.values():
        begins = {call.group_key: call.number for call in reversed(record.calls)}
        first |= {key: max(first.get(key, 0), number) for key, number in begins.items()}
    logs = {rank: Log() for rank in records}
    for rank, record in records.items():
        numbers: Counter[Any] = Counter()
        for call in record.calls:
            group = call.group_key
            if call.state != "over" if call.message else call.number >= first[group]:
                logs[rank].calls.append(replace(call, number=numbers[group]))
                numbers[group] += 1
    return standstill_of(logs, max(call.begin_s for record in records.values() for call in record.calls))
