"""Chooses the next layout of a search: the one that covers most pairs of values that no layout so far has covered."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from pardemo.script.search.axes import SIZE, Axis, Point, Space, Value

#: Two values of different axes, each with its axis's name; of a space with one axis a value alone.
ValuePair = tuple[tuple[str, Value], ...]
#: Refusals of layouts with a pair that no other layout has covered, from which on it is taken for the reason.
REFUSED = 2


class PairCoverage:
    """The layouts of a space that wait to be run, and the pairs of values that have been covered.

    Pairs of which the reference has both are covered from the beginning.
    """

    def __init__(self, space: Space):
        self._axes: Sequence[Axis] = [axis for axis in space.axes if axis.kind != SIZE and len(axis.values) > 1]
        self.points = list(space.points())
        self.waiting = list(self.points)
        random.Random(0).shuffle(self.waiting)  # where layouts cover as much, none comes for its place in the list
        self.waiting.sort(key=lambda point: -len(space.marks(point)))
        self.pairs = {pair for point in self.points for pair in self._pairs_of(point)}
        references = map(space.reference_of, self.points)
        self.pairs -= {pair for reference in references for pair in self._pairs_of(reference)}
        self.covered: set[ValuePair] = set()
        self._refusals: Counter[ValuePair] = Counter()

    def next_point(self, masked: Iterable[Mapping[str, Value]] = ()) -> Point:
        """Returns the next layout: that with most new pairs, and among these the one farthest from the reference.

        Last come layouts that show a known difference again, behind which others do not show, and those with a pair
        that the script seems to refuse.

        Args:
            masked: values that part by themselves: whatever has all values of one of them shows its difference.
        """
        parts = [frozenset(part.items()) for part in masked]
        left = self.pairs - self.covered
        refused = {pair for pair in left if self._refusals[pair] >= REFUSED}

        def merit(point: Point) -> tuple[bool, bool, int]:
            pairs = left.intersection(self._pairs_of(point))
            return not any(part <= point.items() for part in parts), pairs.isdisjoint(refused), len(pairs)

        return max(self.waiting, key=merit)

    def note(self, point: Point, compared: bool) -> None:
        """Notes that a layout was compared, or was refused, perhaps for one of its pairs; it waits no longer."""
        self.waiting.remove(point)
        if compared:
            self.covered |= self.pairs.intersection(self._pairs_of(point))
        else:
            self._refusals.update(self._pairs_of(point))

    def _pairs_of(self, point: Mapping[str, Value]) -> list[ValuePair]:
        values = [(axis.name, point[axis.name]) for axis in self._axes]
        return list(combinations(values, min(2, len(values))))
