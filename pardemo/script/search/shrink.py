"""Shrinks a layout that parts from its reference: values go back to the reference's, sizes become smaller."""

from collections.abc import Callable

from pardemo.script.search.axes import LAYOUT, SIZE, Axis, Point, Space, Value
from pardemo.script.search.search_results import SearchFinding
from pardemo.script.search.verdicts import LayoutVerdict


def shrink(finding: SearchFinding, space: Space, judge: Callable[[Point], LayoutVerdict]) -> None:
    """Makes a finding's point as plain as it can be with the same finding; changes it step by step as it goes.

    First with one axis alone off the reference, then each value by itself, sizes first, until none can go: a form of
    delta debugging (Zeller, Hildebrandt, IEEE Transactions on Software Engineering 28(2), 2002), by axes.

    Args:
        judge: gives the verdict on a point. It may raise what ends the search: the finding is then as small as it has
            become.
    """

    def moves(point: Point) -> bool:
        legal = space.values(point) is not None and space.values(space.reference_of(point)) is not None
        return legal and bool(space.differing(point)) and finding.moves_to(judge(point))

    differing, reference = space.differing(finding.point), space.reference_of(finding.point)
    if len(differing) > 1:
        any(moves({**reference, name: value}) for name, value in differing.items())
    axes, moved = sorted(space.axes, key=lambda axis: axis.kind != SIZE), True
    while moved:  # sizes first: what follows is quicker, and need not be tried again with a smaller one
        moved = False
        for axis in axes:
            values = simpler(axis, finding.point[axis.name])
            moved |= any(moves({**finding.point, axis.name: value}) for value in values)
    finding.smallest = True


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
