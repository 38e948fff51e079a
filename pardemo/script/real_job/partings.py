"""Finds the first call of a job that parts from its rehearsal, and calls that nobody predicted."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from pardemo.script.hangs.journal import LoggedCall
from pardemo.script.hangs.standstill import call_text
from pardemo.script.job_files.records import JobCall, RankRecord
from pardemo.script.real_job.rehearsal import Rehearsal
from pardemo.script.real_job.roles import UNKNOWN, Role, counterparts, role_of, role_text
from pardemo.script.real_job.sequences import Alignment, Edit, Expected, align, new_calls, same_kind, same_size


@dataclass(frozen=True)
class Parting:
    """A call that parts from the rehearsal, and what stood there.

    Args:
        number: of the call among the rank's of its role, in the file. call: None where the job has left one out.
        expected: the rehearsal's; None where it has none there. repeats: only the number of repeats differs.
        beside: the rank of the rehearsal that it was held against. begin_s: when, by the rank's clock.
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
        """Returns it for JSON, with the calls' fields."""
        return vars(self) | {name: call and vars(call) for name, call in (("call", self.call),
                                                                          ("expected", self.expected))}  # fmt: skip


@dataclass
class Traffic:
    """Calls of one kind, role and line that are in one of both alone; ``ranks`` that have them; bytes of all ranks."""

    calls: int = 0
    nbytes: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, rank: int, call: LoggedCall) -> None:
        """Counts a call."""
        self.calls += 1
        self.nbytes += max(call.nbytes, 0)
        self.ranks.add(rank)


@dataclass
class Partings:
    """The differences between ranks' calls, of one kind of file, and the rehearsal's.

    Args:
        compared: roles that both have. first: by rank its first parting. more, fewer: calls of the job, and of the
            rehearsal, that the other does not have, by kind, role and line; of ``more`` without ``--same-size`` those
            of kinds and orders that are new. unknown: calls of groups whose ranks the files do not say.
    """

    compared: list[str]
    first: dict[int, Parting]
    more: dict[tuple[str, str, str], Traffic]
    fewer: dict[tuple[str, str, str], Traffic]
    calls: int
    unknown: int

    @property
    def parts(self) -> list[Parting]:
        """Returns the partings that are no repeats, the earliest first."""
        return sorted((each for each in self.first.values() if not each.repeats), key=lambda parting: parting.begin_s)


def find_partings(records: Mapping[int, RankRecord], rehearsal: Rehearsal, sizes: bool, numbered: bool) -> Partings:
    """Compares each rank's calls with the rehearsal's, role by role; ``sizes``: with bytes and dtypes.

    ``numbered``: whether a call's number says how many came before it in its group, as a flight recorder's does.

    A rank of a job of as many ranks is held against its own; of another job against the one that it differs least from,
    and of several such against the one whose messages go the same ways. A call without a line gets the rehearsal's.
    """
    world = max([record.world for record in records.values()] + [1 + max(records)])
    by_rank = {rank: _by_role(record.calls, world) for rank, record in records.items()}
    theirs = {rank: (_by_role(rehearsal.before[rank], rehearsal.ranks), _by_role(calls, rehearsal.ranks))
              for rank, calls in rehearsal.period.items()}  # fmt: skip
    rehearsed = {role for before, period in theirs.values() for role in (*before, *period)}
    pairs = counterparts((role for roles in by_rank.values() for role in roles), rehearsed)
    names = {role_of("", ranks, rehearsal.ranks): name for ranks, name in rehearsal.groups.items()}
    title = partial(role_text, names={ours: names[role] for ours, role in pairs.items() if role in names})
    made = Partings(sorted(map(title, pairs)), {}, {}, {}, sum(len(record.calls) for record in records.values()), 0)
    known: dict[tuple, _Compared] = {}  # ranks mostly do the same
    for rank, roles in sorted(by_rank.items()):
        made.unknown += len(roles.pop(UNKNOWN, []))
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
            _note(made, rank, beside, title(role), roles[role], of_role, sizes, numbered)
    return made


def _by_role(calls: list[Any], world: int) -> dict[Role, list[Any]]:
    by_role: dict[Role, list[Any]] = defaultdict(list)
    for call in calls:
        if len(call.ranks) != 1:
            by_role[role_of(call.kind, call.ranks, world)].append(call)
    return by_role


class _Compared(NamedTuple):
    """How a rank's calls of one role compare with those of a rehearsed rank.

    ``new``: calls of kinds and orders that are new there, where bytes do not count. ``turned``: how many messages go to
    a higher rank where the rehearsal's go to a lower one, or the other way round.
    """

    expected: Expected
    alignment: Alignment
    new: list[int]
    turned: int


def _compared(
    calls: list[JobCall], beside: int, role: Role, theirs: Any, sizes: bool, numbered: bool, known: dict[tuple, Any]
) -> _Compared:
    """Aligns calls with those of a rehearsed rank, before its measured steps and in them."""
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
    partings: Partings, rank: int, beside: int, role: str, calls: list[JobCall], compared: _Compared, sizes: bool,
    numbered: bool,
) -> None:  # fmt: skip
    """Notes what a rank's calls of one role have in another way than the rehearsal."""
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
    parting = Parting(
        rank, role, at, calls[at] if edit.more else None, expected[edit.position], beside,
        calls[min(at, len(calls) - 1)].begin_s, repeats=not sizes and not new,
    )  # fmt: skip
    earlier = partings.first.get(rank)
    if earlier is None or (parting.repeats, parting.begin_s) < (earlier.repeats, earlier.begin_s):
        partings.first[rank] = parting
    different = [number for each in edits for number in range(each.at, each.at + each.more)]
    for number in different if sizes else [number for number in new if places[number] < 0]:
        partings.more.setdefault((calls[number].kind, role, calls[number].line), Traffic()).add(rank, calls[number])
    for each in edits if sizes else [edit] * bool(new):
        for place in range(each.position, each.position + each.fewer):
            if (absent := expected[place]) is not None:
                partings.fewer.setdefault((absent.kind, role, absent.line), Traffic()).add(rank, absent)


def parting_text(parting: Parting) -> str:
    """Says where a rank parts from the rehearsal: what it calls, and what the rehearsal has there, with both lines."""
    does = f"calls {call_text(parting.call)}" if parting.call else "leaves out a call"
    if parting.expected is None:
        return f"rank {parting.rank} {does}, which the rehearsal does not have"
    there = f"the rehearsal's rank {parting.beside} has {call_text(parting.expected)}"
    return f"rank {parting.rank} {does}, where {there}"
