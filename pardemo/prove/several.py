"""A piece that has several of the reference's parameters in it, as q, k and v in one: what it has of each.

Such a piece is cut into strips, along one axis, each of which is a part of one parameter. All of its rows have to be
found, each at one place: what is found in part, or at two places, is not taken for anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pardemo.prove.record.facts import Piece

#: A row that so many others resemble is nothing to go by: zeros, and other constants.
ALIKE = 16


@dataclass(frozen=True)
class Strip:
    """The rows of a piece that are one parameter's.

    ``number``: which of the piece's strips. ``rows``: of the piece, along ``axis``. ``name``: the reference's, and
    ``places``: which of its rows they are, in order; None where they are all of them.
    """

    number: int
    axis: int
    rows: torch.Tensor
    name: str
    places: torch.Tensor | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The strip of another tensor of the piece's shape."""
        return tensor.index_select(self.axis, self.rows)

    def called(self, piece: str) -> str:
        """The strip's name among pieces."""
        return f"{piece}[{self.number}]"

    def piece(self, whole: Piece) -> Piece:
        """The strip as a piece of its own."""
        shape = (*whole.shape[: self.axis], len(self.rows), *whole.shape[self.axis + 1 :])
        tied = tuple(map(self.called, whole.tied))
        return replace(whole, name=self.called(whole.name), shape=shape, whole=None, start=None, flat=None, tied=tied)


class Strips:
    """The reference's parameters by their rows, and by their columns."""

    def __init__(self, reference: Mapping[str, torch.Tensor], tolerance: float):
        self._reference, self._tolerance = reference, tolerance
        self._tables: dict[tuple[int, tuple[int, ...]], _Table] = {}

    def find(self, value: torch.Tensor) -> list[Strip]:
        """The strips that a piece of these values is; empty where it is not known of each row which one it is."""
        for axis in range(value.dim()) if value.numel() else ():
            others = (*value.shape[:axis], *value.shape[axis + 1 :])
            if (axis, others) not in self._tables:
                self._tables[axis, others] = _Table(self._reference, axis, others, self._tolerance)
            table = self._tables[axis, others]
            places = table.places(value.movedim(axis, 0).reshape(value.shape[axis], -1))
            if places is not None:
                return table.strips(places)
        return []

    def beside(self, strips: Sequence[Strip], own: str, value: torch.Tensor) -> list[Strip]:
        """The strips of a layer's bias, by those of its weight; empty where the values are others.

        Args:
            own: the parameter's name in its module, which is the same in the reference.
        """
        if any(strip.axis for strip in strips) or sum(len(strip.rows) for strip in strips) != len(value):
            return []
        made = []
        for strip in strips:
            name = f"{strip.name.rpartition('.')[0]}.{own}".lstrip(".")
            whole = self._reference.get(name)
            if whole is None or whole.dim() != value.dim() or len(whole) < len(strip.rows):
                return []
            part = whole if strip.places is None else whole.index_select(0, strip.places)
            if part.shape != strip.of(value).shape or not _equal(part, strip.of(value), self._tolerance, whole):
                return []
            made.append(replace(strip, name=name))
        return made


def _equal(a: torch.Tensor, b: torch.Tensor, tolerance: float, whole: torch.Tensor) -> bool:
    return bool(((a - b).abs() <= tolerance * whole.abs().max()).all())


class _Table:
    """Rows of all parameters of a shape, along an axis, in the order of one projection: equal rows have an equal one.

    A row's place is counted over all parameters, one after the other.
    """

    def __init__(self, reference: Mapping[str, torch.Tensor], axis: int, others: tuple[int, ...], tolerance: float):
        self._axis, self._tolerance = axis, tolerance
        self._names: list[str] = []
        self._wholes: list[torch.Tensor] = []
        for name, whole in reference.items():
            if whole.dim() == len(others) + 1 and (*whole.shape[:axis], *whole.shape[axis + 1 :]) == others:
                self._names.append(name)
                self._wholes.append(whole.movedim(axis, 0).reshape(whole.shape[axis], -1))
        sizes = torch.tensor([0, *(len(whole) for whole in self._wholes)])
        self._begins = sizes.cumsum(0)
        width = torch.Size(others).numel()
        self._weights = torch.randn(width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        numbers = torch.cat([whole.double() @ self._weights for whole in self._wholes] or [torch.zeros(0)])
        self._sorted, self._order = numbers.double().sort()
        self._scales = torch.tensor([float(whole.abs().max()) if len(whole) else 0.0 for whole in self._wholes])
        # roundings add up as random numbers do, and eight times that is more than they ever are
        largest = max(self._scales.tolist(), default=0.0)
        self._window = 8 * tolerance * largest * float(self._weights.norm())

    def places(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Of each row its place, each another one; None where one has none, or two."""
        if not len(rows) or not rows.numel() or not len(self._sorted):
            return None
        numbers = rows.double() @ self._weights
        first = torch.searchsorted(self._sorted, numbers - self._window)
        many = torch.searchsorted(self._sorted, numbers + self._window, right=True) - first
        if bool(((many == 0) | (many > ALIKE)).any()):
            return None
        row = torch.arange(len(rows)).repeat_interleave(many)
        within = torch.arange(len(row)) - (many.cumsum(0) - many).repeat_interleave(many)
        place = self._order[first.repeat_interleave(many) + within]
        equal = self._equal(rows, row, place)
        row, place = row[equal], place[equal]
        found = torch.bincount(row, minlength=len(rows))
        if bool((found == 0).any()):
            return None
        made = self._one_of(place.split(found.tolist())) if bool((found > 1).any()) else place
        return made if made is not None and len(made.unique()) == len(made) else None

    def _equal(self, rows: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Whether these rows are those at these places."""
        equal = torch.zeros(len(row), dtype=torch.bool)
        parameter = self._parameter(place)
        for number in parameter.unique().tolist():
            own = parameter == number
            there = self._wholes[number].index_select(0, place[own] - self._begins[number])
            off = (rows.index_select(0, row[own]) - there).abs().amax(1)
            equal[own] = off <= self._tolerance * self._scales[number]
        return equal

    def _parameter(self, place: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(self._begins, place, right=True) - 1

    def _one_of(self, places: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Where rows are at several places, as numbers of a bias may be: the one that goes on from a neighbour's."""
        begins = set(self._begins.tolist())
        made = [int(some[0]) if len(some) == 1 else None for some in places]
        ways = []
        for step in (1, -1):
            way = list(made)
            for at in range(len(way))[::step]:
                before = way[at - step] if 0 <= at - step < len(way) else None
                if way[at] is None and before is not None:
                    after = before + step
                    same = (after if step > 0 else before) not in begins  # of the same parameter
                    way[at] = after if same and after in places[at].tolist() else None
            ways.append(way)
        both = [{place for place in pair if place is not None} for pair in zip(*ways, strict=True)]
        return torch.tensor([next(iter(some)) for some in both]) if all(len(some) == 1 for some in both) else None

    def strips(self, places: torch.Tensor) -> list[Strip]:
        """Of each parameter the rows that are its own, in the order in which the piece has the parameters."""
        parameter = self._parameter(places)
        made = []
        for number, of in enumerate(dict.fromkeys(parameter.tolist())):
            rows = (parameter == of).nonzero().reshape(-1)
            own, order = (places[rows] - self._begins[of]).sort()
            every = len(own) == len(self._wholes[of])
            made.append(Strip(number, self._axis, rows[order], self._names[of], None if every else own))
        return made
