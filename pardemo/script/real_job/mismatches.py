"""Finds the first call of a job that differs from its rehearsal, and calls that nobody predicted."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from pardemo.script.hangs.journal import LoggedCall
from pardemo.script.hangs.standstill import call_text
from pardemo.script.job_files.records import JobCall, JobRankRecord
from pardemo.script.real_job.rehearsal import Rehearsal
from pardemo.script.real_job.roles import UNKNOWN, Role, counterparts, role_of, role_text
from pardemo.script.real_job.sequences import Alignment, Edit, Expected, align, new_calls, same_kind, same_size


@dataclass(frozen=True)
class CallMismatch:
    """A call of a job that differs from the rehearsal's call at the same place.

    Args:
        role: the call's process group in words. number: of the call among the rank's calls of that role, in the file.
        call: the job's; None where the job leaves one out. expected: the rehearsal's; None where it has none there.
        beside: the rank of the rehearsal that the rank was compared with. begin_s: when, by the rank's clock.
        repeats: whether only the number of repeats differs.
    """

    rank: int
    role: str
    number: int
    call: JobCall | None
    expected: LoggedCall | None
    beside: int
    begin_s: float
    repeats: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the mismatch for JSON, with the fields of both calls."""
        return vars(self) | {name: call and vars(call) for name, call in (("call", self.call),
                                                                          ("expected", self.expected))}  # fmt: skip


@dataclass
class CallCount:
    """The calls of one kind, role and line that only the job or only the rehearsal has; ``nbytes``: of all ranks."""

    calls: int = 0
    nbytes: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, rank: int, call: LoggedCall) -> None:
        """Counts a call."""
        self.calls += 1
        self.nbytes += max(call.nbytes, 0)
        self.ranks.add(rank)


@dataclass
class JobMismatches:
    """The differences between a job's calls, as one kind of file has them, and the rehearsal's.

    Args:
        compared: roles that both have. first: the first mismatch of each rank that has one.
        more, fewer: calls that only the job has, and only the rehearsal, by kind, role and line. Without
            ``--same-size`` the former are only those whose kind, or place behind another kind, is new.
        calls: how many the files have. unknown: calls of groups whose ranks the files do not say.
    """

    compared: list[str]
    first: dict[int, CallMismatch]
    more: dict[tuple[str, str, str], CallCount]
    fewer: dict[tuple[str, str, str], CallCount]
    calls: int
    unknown: int

    @property
    def differing(self) -> list[CallMismatch]:
        """Returns the mismatches in more than the number of repeats, the earliest first."""
        return sorted((each for each in self.first.values() if not each.repeats), key=lambda mismatch: mismatch.begin_s)


def find_mismatches(
    records: Mapping[int, JobRankRecord], rehearsal: Rehearsal, sizes: bool, numbered: bool
) -> JobMismatches:
    """Compares each rank's calls with the rehearsal's, role by role.

    Where the job has as many ranks as the rehearsal, each rank is compared with the same rank; else with the one that
    it differs least from, and of several such with the one whose messages go the same ways. A call without a line gets
    the rehearsal's.

    Args:
        sizes: whether bytes and dtypes are compared, too.
        numbered: whether a call's number says how many came before it in its group, as a flight recorder's does.
    """
    world = max([record.world for record in records.values()] + [1 + max(records)])
    by_rank = {rank: _by_role(record.calls, world) for rank, record in records.items()}
    theirs = {rank: (_by_role(rehearsal.before[rank], rehearsal.ranks), _by_role(calls, rehearsal.ranks))
              for rank, calls in rehearsal.period.items()}  # fmt: skip
    rehearsed = {role for before, period in theirs.values() for role in (*before, *period)}
    pairs = counterparts((role for roles in by_rank.values() for role in roles), rehearsed)
    names = {role_of("", ranks, rehearsal.ranks): name for ranks, name in rehearsal.groups.items()}
    title = partial(role_text, names={ours: names[role] for ours, role in pairs.items() if role in names})
    result = JobMismatches(
        sorted(map(title, pairs)), {}, {}, {}, sum(len(record.calls) for record in records.values()), 0
    )
    known: dict[tuple, _Compared] = {}  # ranks mostly do the same
    for rank, roles in sorted(by_rank.items()):
        result.unknown += len(roles.pop(UNKNOWN, []))
        compared = {
            beside: {
                role: _compared(calls, beside, pairs.get(role, UNKNOWN), theirs[beside], sizes, numbered, known)
                for role, calls in roles.items()
            }
            for beside in ([rank] if world == rehearsal.ranks else theirs)
        }
        costs = {beside: (sum(each.alignment.cost for each in of_roles.values()),
                          sum(each.turned for each in of_roles.values()), beside != rank % rehearsal.ranks)
                 for beside, of_roles in compared.items()}  # fmt: skip
        beside = min(costs, key=lambda other: costs[other])
        for role, of_role in compared[beside].items():
            _note(result, rank, beside, title(role), roles[role], of_role, sizes, numbered)
    return result


def _by_role(calls: list[Any], world: int) -> dict[Role, list[Any]]:
    by_role: dict[Role, list[Any]] = defaultdict(list)
    for call in calls:
        if len(call.ranks) != 1:
            by_role[role_of(call.kind, call.ranks, world)].append(call)
    return by_role


class _Compared(NamedTuple):
    """The result of comparing a rank's calls of one role with those of a rehearsed rank.

    ``new``: calls whose kind, or place behind another kind, is new, where bytes do not count. ``turned``: how many
    messages go to a higher rank where the rehearsal's go to a lower one, or the other way round.
    """

    expected: Expected
    alignment: Alignment
    new: list[int]
    turned: int


def _compared(
    calls: list[JobCall], beside: int, role: Role, theirs: Any, sizes: bool, numbered: bool, known: dict[tuple, Any]
) -> _Compared:
    """Aligns calls with those of a rehearsed rank, of the steps before the measured ones and of these."""
    start = numbered and not any(call.number for call in calls[:1])
    likeness = tuple((call.kind, _upward(call), *((call.nbytes, call.dtype) if sizes else ())) for call in calls)
    if (key := (beside, role, start, likeness)) not in known:
        expected = Expected(*(part.get(role, []) for part in theirs))
        alignment = align(calls, expected, same_size if sizes else same_kind, start)
        new = new_calls(calls, expected, alignment.places, start) if alignment.cost and not sizes else []
        there = [expected[place] for place in alignment.places]
        turned = sum(b is not None and _upward(a) != _upward(b) for a, b in zip(calls, there, strict=True))
        known[key] = _Compared(expected, alignment, new, turned)
    return known[key]


def _upward(call: LoggedCall) -> bool:
    """Whether a message goes to a higher rank; of a collective it is always so, or never."""
    return call.ranks[:1] < call.ranks[-1:]


def _note(
    result: JobMismatches, rank: int, beside: int, role: str, calls: list[JobCall], compared: _Compared, sizes: bool,
    numbered: bool,
) -> None:  # fmt: skip
    """Adds to ``result`` where a rank's calls of one role differ from the rehearsal's."""
    expected, (places, edits, _), new, _ = compared
    for call, place in zip(calls, places, strict=True):
        there = expected[place]
        if there and (not numbered or not call.line):  # a trace has a function's first line alone
            call.line = there.line or call.line
    if not edits:
        return
    edit = edits[0]
    if new:  # the first difference may be no more than a repeat
        near = (each for each in edits if each.at <= new[0] < each.at + max(each.more, 1))
        edit = next(near, Edit(new[0], -1, 1, 0))
    at = max([edit.at, *new[:1]]) if edit.more else edit.at
    mismatch = CallMismatch(
        rank, role, at, calls[at] if edit.more else None, expected[edit.position], beside,
        calls[min(at, len(calls) - 1)].begin_s, repeats=not sizes and not new,
    )  # fmt: skip
    earlier = result.first.get(rank)
    if earlier is None or (mismatch.repeats, mismatch.begin_s) < (earlier.repeats, earlier.begin_s):
        result.first[rank] = mismatch
    different = [number for each in edits for number in range(each.at, each.at + each.more)]
    for number in different if sizes else [number for number in new if places[number] < 0]:
        result.more.setdefault((calls[number].kind, role, calls[number].line), CallCount()).add(rank, calls[number])
    for each in edits if sizes else [edit] * bool(new):
        for place in range(each.position, each.position + each.fewer):
            if (absent := expected[place]) is not None:
                result.fewer.setdefault((absent.kind, role, absent.line), CallCount()).add(rank, absent)


def mismatch_text(mismatch: CallMismatch) -> str:
    """Describes a mismatch: what the rank calls, and what the rehearsal has there, with both lines."""
    does = f"calls {call_text(mismatch.call)}" if mismatch.call else "leaves out a call"
    if mismatch.expected is None:
        return f"rank {mismatch.rank} {does}, which the rehearsal does not have"
    there = f"the rehearsal's rank {mismatch.beside} has {call_text(mismatch.expected)}"
    return f"rank {mismatch.rank} {does}, where {there}"
