"""Unions of many spans of time, and how much of one another union covers."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class Coverage:
    """The union of spans.

    Args:
        begins, ends: of each span, in any order and unit; spans may overlap.

    Attributes: ``total``, the union's length; ``begin`` and ``end``, of all of it (0 where there is no span).
    """

    def __init__(self, begins: Sequence[float], ends: Sequence[float]):
        given, until = np.asarray(begins, dtype=float), np.asarray(ends, dtype=float)
        order = np.argsort(given, kind="stable")
        given, until = given[order], np.maximum.accumulate(until[order])
        first = np.ones(len(given), dtype=bool)  # of the spans that touch one another
        first[1:] = given[1:] > until[:-1]
        last = np.roll(first, -1)
        self._begins, self._ends = given[first], np.maximum(until[last], given[first])
        lengths = self._ends - self._begins
        self.total = float(lengths.sum())
        self.begin, self.end = (float(self._begins[0]), float(self._ends[-1])) if len(given) else (0.0, 0.0)
        self._bounds = np.stack([self._begins, self._ends], axis=1).ravel()
        behind = np.cumsum(lengths)
        self._covered = np.stack([behind - lengths, behind], axis=1).ravel()

    def within(self, begins: Any, ends: Any) -> Any:
        """Returns of each given span the length that the union covers."""
        if not len(self._bounds):
            return np.zeros_like(np.asarray(begins, dtype=float))
        at_begin, at_end = (np.interp(at, self._bounds, self._covered) for at in (begins, ends))
        return at_end - at_begin

    def overlap(self, other: "Coverage") -> float:
        """Returns the length of what both unions cover."""
        return float(self.within(other._begins, other._ends).sum())
