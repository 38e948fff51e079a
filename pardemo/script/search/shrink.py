"""Shrinks a layout that parts from its reference: values go back to the reference's, sizes become smaller."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pardemo.script.search.axes import LAYOUT, SIZE, Axis, Point, Space, Value
from pardemo.script.search.verdicts import SeenFinding, Verdict, alike

#: Gives the verdict on a point.
Judge = Callable[[Point], Verdict]


@dataclass
class Parting:
    """A point that parts from its reference, its verdict, and the finding that is followed while it shrinks.

    ``smallest``: whether all that may go has been tried.
    """

    point: Point
    verdict: Verdict
    seen: SeenFinding
    smallest: bool = False

    def moves_to(self, point: Point, verdict: Verdict) -> bool:
        """Goes on to another point, if that has a finding alike, with its cause where it has one; returns whether."""
        now = self.seen.finding
        fits = [seen for seen in verdict.findings if alike(seen.finding, now) and now.cause in ("", seen.finding.cause)]
        seen = fits[0] if fits else None
        if seen is not None:
            self.point, self.verdict, self.seen = point, verdict, seen
        return seen is not None


def shrink(parting: Parting, space: Space, judge: Judge) -> None:
    """Makes a parting's point as plain as it can be with the same finding; changes it step by step as it goes.

    First with one axis alone off the reference, then each value by itself, until none can go: a form of delta debugging
    (Zeller, Hildebrandt, IEEE Transactions on Software Engineering 28(2), 2002), by axes.

    Args:
        judge: may raise what ends the search; the parting is then as small as it has become.
    """
    for point in _with_one_axis(parting.point, space):
        if _moves(parting, point, space, judge):
            break
    moved = True
    while moved:
        moved = any(
            _moves(parting, {**parting.point, axis.name: value}, space, judge)
            for axis in space.axes for value in simpler(axis, parting.point[axis.name])
        )  # fmt: skip
    parting.smallest = True


def _with_one_axis(point: Point, space: Space) -> Iterator[Point]:
    """Yields the points in which one axis alone is not the reference's, where now several are."""
    differing, reference = space.differing(point), space.reference_of(point)
    if len(differing) > 1:
        yield from ({**reference, name: value} for name, value in differing.items())


def _moves(parting: Parting, point: Point, space: Space, judge: Judge) -> bool:
    legal = space.values(point) is not None and space.values(space.reference_of(point)) is not None
    return legal and bool(space.differing(point)) and parting.moves_to(point, judge(point))


def simpler(axis: Axis, value: Value) -> tuple[Value, ...]:
    """Returns the values of an axis that are simpler than this one, the simplest first.

    Of sizes those that come later; else the first one, and of numbers those between it and this one.
    """
    if axis.kind == SIZE:
        return axis.values[: axis.values.index(value) : -1]
    first = axis.values[0]
    if value == first:
        return ()
    numbers = [other for other in axis.values if isinstance(other, int) and isinstance(value, int) and other < value]
    return tuple(dict.fromkeys([first, *(sorted(numbers) if axis.kind == LAYOUT else ())]))
