"""Aligns a rank's calls with those of the rehearsal, which repeats its measured steps as long as the job goes on.

A job's file may begin with the job's first call, or anywhere in a later step. So each place of a measured step is a
candidate for the file's first call, and the one is chosen from which the fewest calls have to be inserted or deleted.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pardemo.script.hangs.journal import LoggedCall

#: Calls by which each candidate is scored first.
_SCORED_CALLS = 48
#: Candidates with the best scores, which are then aligned to the end.
_CANDIDATES = 12
#: Calls of the job and of the rehearsal that an edit may pass over together, before both agree again.
_EDIT_WINDOW = 20
#: Calls behind an edit that are compared, to count how many agree.
_LOOK_AHEAD = 200
#: Edits after which those that are longer than the window are no longer tried.
_FAR_EDITS = 20
#: Edits after which the rest of the calls counts as one.
_MOST_EDITS = 1000
#: Says whether a call of the job is the one that the rehearsal has.
Fits = Callable[[LoggedCall, LoggedCall], bool]


class Expected:
    """A rehearsal's calls of one role: those ``before`` its measured steps, then the ``period`` of these, repeated."""

    def __init__(self, before: Sequence[LoggedCall], period: Sequence[LoggedCall]):
        self.before, self.period = before, period
        self.places = len(before) + len(period)

    def __getitem__(self, number: int) -> LoggedCall | None:
        """Returns the call with that number; None for −1, and behind the last call where the period is empty."""
        if number < 0:
            return None
        if number < len(self.before):
            return self.before[number]
        return self.period[(number - len(self.before)) % len(self.period)] if self.period else None


class Edit(NamedTuple):
    """An edit: ``more`` calls of the job, from ``at``, replace ``fewer`` of the rehearsal, from ``position``."""

    at: int
    position: int
    more: int
    fewer: int


class Alignment(NamedTuple):
    """The places of a job's calls in the rehearsal (−1: nowhere), the edits, and how many calls differ by them."""

    places: list[int]
    edits: list[Edit]
    cost: int


def same_kind(call: LoggedCall, expected: LoggedCall) -> bool:
    """Whether two calls are of one kind."""
    return call.kind == expected.kind


def same_size(call: LoggedCall, expected: LoggedCall) -> bool:
    """Whether two calls are of one kind, with as many bytes of one dtype.

    A trace may not say these. How much an all-to-all sends depends on what a router chose.
    """
    unknown = call.nbytes < 0 or call.kind == "all-to-all"
    return call.kind == expected.kind and (unknown or (call.nbytes, call.dtype) == (expected.nbytes, expected.dtype))


def align(calls: Sequence[LoggedCall], expected: Expected, fits: Fits, from_start: bool) -> Alignment:
    """Aligns a job's calls with the rehearsal's, from its first (``from_start``) or from where they differ least."""
    best = Alignment([-1] * len(calls), [Edit(0, 0, len(calls), 0)] if calls else [], len(calls))
    if not calls or not expected.places:
        return best
    starts = range(1) if from_start else range(len(expected.before), expected.places)
    agreeing = {start: _agreeing(calls, expected, fits, start) for start in starts}
    for start in sorted(agreeing, key=lambda start: -agreeing[start])[:_CANDIDATES]:
        best = _follow(calls, expected, fits, start, best.cost) or best
        if not best.cost:
            break
    return best


def new_calls(calls: Sequence[LoggedCall], expected: Expected, places: Sequence[int], from_start: bool) -> list[int]:
    """Finds the calls whose kind the rehearsal does not have, or never has behind the kind of the call before.

    How often a kind is repeated does not count: a larger model has more layers. The rehearsal's first steps count only
    for calls ``from_start`` that the alignment has placed there (``places``).
    """
    measured = (number for number, place in enumerate(places) if place >= len(expected.before))
    steady = next(measured, len(calls)) if from_start else 0
    repeated = [call.kind for call in (*expected.period, *expected.period)]
    new, last = [], ""
    for kinds, numbers in (
        ([call.kind for call in expected.before] + repeated, range(steady)), (repeated, range(steady, len(calls)))
    ):  # fmt: skip
        known, behind = set(kinds), set(pairwise(kinds))
        for number in numbers:
            kind = calls[number].kind
            if kind in known and (last in ("", kind) or number == steady or (last, kind) in behind):
                last = kind
            else:
                new.append(number)
                last = last if places[number] < 0 else kind
    return new


def _agreeing(calls: Sequence[LoggedCall], expected: Expected, fits: Fits, start: int) -> int:
    """Scores a start without edits: counts the calls that fit, those before the first that does not fit twice."""
    fitting = sum(
        _fit(calls, expected, fits, number, start + number) for number in range(min(_SCORED_CALLS, len(calls)))
    )
    return fitting + _agreement(calls, expected, fits, 0, start)


def _fit(calls: Sequence[LoggedCall], expected: Expected, fits: Fits, number: int, position: int) -> bool:
    there = expected[position]
    return there is not None and fits(calls[number], there)


def _follow(calls: Sequence[LoggedCall], expected: Expected, fits: Fits, start: int, most: int) -> Alignment | None:
    """Aligns the calls from a place on; returns None as soon as ``most`` of them differ."""
    number, place, cost, places = 0, start, 0, [-1] * len(calls)
    edits: list[Edit] = []
    while number < len(calls):
        if _fit(calls, expected, fits, number, place):
            places[number] = place
            number, place = number + 1, place + 1
            continue
        more, fewer = _difference(calls, expected, fits, number, place, len(edits))
        cost += max(more, fewer)
        if cost >= most:
            return None
        edits.append(Edit(number, place, more, fewer))
        number, place = number + more, place + fewer
    return Alignment(places, edits, cost)


def _difference(
    calls: Sequence[LoggedCall], expected: Expected, fits: Fits, number: int, position: int, before: int
) -> tuple[int, int]:
    """Finds the fewest calls of the job and of the rehearsal to pass over until both agree again."""
    left = len(calls) - number
    if before >= _MOST_EDITS:
        return left, 0
    near = [(size, n) for size in range(_EDIT_WINDOW) for n in range(_EDIT_WINDOW) if size + n and size < left]
    far = [(size, 0) for size in range(_EDIT_WINDOW, left)]
    far += [(0, size) for size in range(_EDIT_WINDOW, len(expected.period))]
    # what is near may agree by little: each step may have its difference
    for sides, least in ((near, 1), (far if before < _FAR_EDITS else [], 4)):
        agreeing = [
            (_agreement(calls, expected, fits, number + more, position + fewer), more, fewer) for more, fewer in sides
        ]
        score, more, fewer = max(
            ((n - 2 * max(more, fewer), more, fewer) for n, more, fewer in agreeing if n >= min(least, left - more)),
            key=lambda side: (side[0], -side[1] - side[2]), default=(0, 0, 0),
        )  # fmt: skip
        if more + fewer:
            return more, fewer
    return left, 0


def _agreement(calls: Sequence[LoggedCall], expected: Expected, fits: Fits, number: int, position: int) -> int:
    """Counts the calls that fit from two places on, up to the first that does not, or :data:`_LOOK_AHEAD`."""
    ahead = range(min(_LOOK_AHEAD, len(calls) - number))
    return next((n for n in ahead if not _fit(calls, expected, fits, number + n, position + n)), len(ahead))
