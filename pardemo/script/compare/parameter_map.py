"""Which part of the reference's parameters each rank's piece is, and parameters put together from pieces."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from pardemo.script.record.records import Piece

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

    def cut_from(self, tensor: torch.Tensor) -> torch.Tensor:
        """The strip of another tensor of the piece's shape."""
        return tensor.index_select(self.axis, self.rows)

    def name_in(self, piece: str) -> str:
        """The strip's name among pieces."""
        return f"{piece}[{self.number}]"

    def as_piece(self, whole: Piece) -> Piece:
        """The strip as a piece of its own."""
        shape = (*whole.shape[: self.axis], len(self.rows), *whole.shape[self.axis + 1 :])
        tied = tuple(map(self.name_in, whole.tied))
        return replace(whole, name=self.name_in(whole.name), shape=shape, whole=None, start=None, flat=None, tied=tied)


class Strips:
    """The reference's parameters by their rows, and by their columns."""

    def __init__(self, reference: Mapping[str, torch.Tensor], tolerance: float):
        self._reference, self._tolerance = reference, tolerance
        self._tables: dict[tuple[int, tuple[int, ...]], _RowTable] = {}

    def find(self, value: torch.Tensor) -> list[Strip]:
        """The strips that a piece of these values is; empty where it is not known of each row which one it is."""
        for axis in range(value.dim()) if value.numel() else ():
            others = (*value.shape[:axis], *value.shape[axis + 1 :])
            if (axis, others) not in self._tables:
                self._tables[axis, others] = _RowTable(self._reference, axis, others, self._tolerance)
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
            own_rows = strip.cut_from(value)
            if part.shape != own_rows.shape or bool(
                ((part - own_rows).abs() > self._tolerance * whole.abs().max()).any()
            ):
                return []
            made.append(replace(strip, name=name))
        return made


class _RowTable:
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


@dataclass(frozen=True)
class Part:
    """Where a rank's piece lies in the reference's parameter.

    ``name``: the reference's. ``index``: of each axis the places, or None for all of it; ``flat``: first element of a
    range instead.
    """

    name: str
    index: tuple[torch.Tensor | None, ...] = ()
    flat: int | None = None

    def key(self) -> tuple:
        """Equal for pieces that hold the same elements."""
        places = tuple(None if axis is None else tuple(axis.tolist()) for axis in self.index)
        return self.name, places, self.flat

    def cut_from(self, whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The same part of another whole tensor. [shape]"""
        if self.flat is not None:
            count = torch.Size(shape).numel()
            return whole.reshape(-1)[self.flat : self.flat + count].reshape(shape)
        for axis, places in enumerate(self.index):
            if places is not None:
                whole = whole.index_select(axis, places)
        return whole


@dataclass
class ParameterMap:
    """Which part of the reference's parameters each rank's piece is.

    ``parts``: by rank and the piece's own name. ``unknown``: pieces of which nothing says it, with the reason.
    ``different``: names whose values differ at the begin though shape and name are the same. ``strips``: by rank and
    name, pieces that are several parameters' in one; ``parts`` has the strips of these. ``moved``: of a name that the
    framework says a piece is cut from, the other parameter of the reference that has the piece's values.
    """

    parts: dict[int, dict[str, Part]] = field(default_factory=dict)
    unknown: dict[int, dict[str, str]] = field(default_factory=dict)
    different: set[str] = field(default_factory=set)
    moved: dict[str, str] = field(default_factory=dict)
    strips: dict[int, dict[str, list[Strip]]] = field(default_factory=dict)

    def sharing(self, names: Iterable[str]) -> list[str]:
        """The reference's parameters that some piece has in one with one of these."""
        asked, found = set(names), []
        for own in self.strips.values():
            for strips in own.values():
                if asked & {strip.name for strip in strips}:
                    found += [strip.name for strip in strips]
        return found

    def leave_out_unused(self, rank: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Of pieces of one rank that are the same part: those without a gradient, where another of them has one.

        A stage of Megatron-core's with a head and a table that are tied has a head's weight beside, which nothing uses.
        """
        by_part: dict[tuple, list[str]] = {}
        for name, part in self.parts[rank].items():
            by_part.setdefault(part.key(), []).append(name)
        for names in by_part.values():
            used = [name for name in names if name in gradients and bool(gradients[name].any())]
            for name in names if len(names) > len(used) > 0 else ():
                if name not in used:
                    del self.parts[rank][name]

    def whole_names(self, names: Iterable[str]) -> set[str]:
        """The pieces of these names: for a strip's, the name of what it is a strip of."""
        by_strip = {
            strip.name_in(name): name
            for own in self.strips.values()
            for name, strips in own.items()
            for strip in strips
        }
        return {by_strip.get(name, name) for name in names}


def map_parameters(
    reference: Mapping[str, torch.Tensor],
    pieces: Mapping[int, list[tuple[Piece, torch.Tensor]]],
    tied: Mapping[str, str],
    tolerance: float,
) -> ParameterMap:
    """Finds for every rank's every piece its part of the reference.

    Args:
        reference: whole parameters before the first step, by name. tied: other names of them.
        pieces: of each rank what it holds, with its values before the first step.
        tolerance: relative, up to which values are the same: frameworks may have kept them in another type.
    """
    maps = ParameterMap()
    by_row, in_strips = _RowIndex(reference), Strips(reference, tolerance)
    for rank, of_rank in pieces.items():
        found = maps.parts.setdefault(rank, {})
        cut = maps.strips.setdefault(rank, {})
        left = []
        for piece, value in of_rank:
            part = _stated_part(reference, tied, piece, value, by_row, tolerance, maps)
            if part is None:
                left.append((piece, value))
            else:
                found[piece.name] = part
        for piece, value in sorted(left, key=lambda one: -one[1].dim()):  # a bias is cut as its weight
            strips = _strips(in_strips, cut, piece, value)
            if strips:
                cut[piece.name] = strips
                for strip in strips:
                    index = tuple(strip.places if axis == strip.axis else None for axis in range(value.dim()))
                    found[strip.name_in(piece.name)] = Part(strip.name, index)
                continue
            part = _part_by_sibling(reference, found, piece, value)
            if part is None:
                where = maps.unknown.setdefault(rank, {})
                where[piece.name] = f"shape {list(piece.shape)}, and no part of the reference has its values"
            else:
                found[piece.name] = part
    return maps


def _strips(found: Strips, cut: Mapping[str, list[Strip]], piece: Piece, value: torch.Tensor) -> list[Strip]:
    """Of a piece that is several parameters' in one what it has of each: a bias as the weight beside it."""
    if piece.flat is not None:
        return []
    module, _, own = piece.name.rpartition(".")
    beside = [strips for name, strips in cut.items() if name.rpartition(".")[0] == module]
    by_weight = (found.beside(strips, own, value) for strips in beside) if value.dim() == 1 else ()
    return next(filter(None, by_weight), None) or found.find(value)


def _is_same(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    scale = b.abs().max().item() if b.numel() else 0.0
    return bool(((a - b).abs() <= tolerance * scale).all())


def _stated_part(
    reference: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    piece: Piece,
    value: torch.Tensor,
    rows: "_RowIndex",
    tolerance: float,
    maps: ParameterMap,
) -> Part | None:
    """By the framework's own word, by equal values, or by name and shape, in this order."""
    names = [tied.get(name, name) for name in (piece.name, *piece.tied)]
    name = next((one for one in names if one in reference), None)
    whole = reference.get(name) if name else None
    if whole is not None and piece.flat is not None and piece.whole == tuple(whole.shape):
        part = Part(name or "", flat=piece.flat)
        if not _is_same(part.cut_from(whole, tuple(value.shape)), value, tolerance):
            maps.different.add(part.name)
        return part
    if whole is not None and piece.start is not None and piece.whole == tuple(whole.shape):
        index = tuple(
            None if size == of else torch.arange(begin, begin + size)
            for begin, size, of in zip(piece.start, value.shape, whole.shape, strict=True)
        )
        part = Part(name or "", index)
        if _is_same(part.cut_from(whole, tuple(value.shape)), value, tolerance):
            return part
    if whole is not None and whole.shape == value.shape and _is_same(whole, value, tolerance):
        return Part(name or "", (None,) * whole.dim())
    constant = value.numel() == 0 or bool((value == value.reshape(-1)[0]).all())
    if not constant:
        found = rows.find(value, name, tolerance)
        if found is not None:
            said = whole is not None and piece.start is not None and piece.whole == tuple(whole.shape)
            # a stage's layer 0 may well be the reference's layer 2
            if said and _last_names(found.name) not in [_last_names(one) for one in names]:
                maps.moved.setdefault(name or "", found.name)
            return found
    if whole is not None and whole.shape == value.shape:
        if not constant or not bool((whole == whole.reshape(-1)[0]).all()):
            maps.different.add(name or "")
        return Part(name or "", (None,) * whole.dim()) if not constant else None
    return None


def _last_names(name: str) -> list[str]:
    """A parameter's name and its module's, without where that stands."""
    return name.split(".")[-2:]


class _RowIndex:
    """The reference's parameters by their rows and columns: whose part has equal ones?"""

    def __init__(self, reference: Mapping[str, torch.Tensor]):
        self._reference = reference
        self._tables: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor, float]] = {}

    def find(self, value: torch.Tensor, name: str | None, tolerance: float) -> Part | None:
        """The one parameter that has these values, whole or cut along one axis; the one of this name first."""
        names = [name] if name else []
        names += [other for other, whole in self._reference.items() if other != name and whole.dim() == value.dim()]
        if name and not self._fits(name, value):
            names.remove(name)
        candidates = []
        for other in names:
            part = self._part(other, value, tolerance)
            if part is not None:
                if other == name:
                    return part
                candidates.append(part)
        return candidates[0] if len(candidates) == 1 else None

    def _fits(self, name: str, value: torch.Tensor) -> bool:
        return name in self._reference and self._reference[name].dim() == value.dim()

    def _part(self, name: str, value: torch.Tensor, tolerance: float) -> Part | None:
        whole = self._reference[name]
        unequal = [axis for axis in range(value.dim()) if value.shape[axis] != whole.shape[axis]]
        if len(unequal) > 1:
            return None
        if not unequal and _is_same(whole, value, tolerance):
            return Part(name, (None,) * value.dim())
        for axis in unequal or range(value.dim()):
            if value.shape[axis] > whole.shape[axis]:
                return None
            places = self._places(name, whole, value, axis, tolerance)
            if places is not None:
                return Part(name, tuple(places if one == axis else None for one in range(value.dim())))
        return None

    def _places(
        self, name: str, whole: torch.Tensor, value: torch.Tensor, axis: int, tolerance: float
    ) -> torch.Tensor | None:
        """The places along an axis that have the value's slices, each once; None where one is nowhere."""
        if (name, axis) not in self._tables:
            slices = whole.movedim(axis, 0).reshape(whole.shape[axis], -1)
            largest = slices.abs().max().item() or 1.0
            self._tables[name, axis] = (slices, slices.sum(1) + slices[:, 0] * 0.5, largest)
        slices, sums, scale = self._tables[name, axis]
        own = value.movedim(axis, 0).reshape(value.shape[axis], -1)
        if own.shape[1] != slices.shape[1]:
            return None
        places = []
        for number in range(len(own)):  # most pieces are no part of most parameters, and the first row says so
            row = own[number]
            best = int((sums - (row.sum() + row[0] * 0.5)).abs().argmin())
            if not bool(((row - slices[best]).abs() <= tolerance * scale).all()):
                return None
            places.append(best)
        return torch.tensor(places) if len(set(places)) == len(places) else None


def _part_by_sibling(
    reference: Mapping[str, torch.Tensor], found: Mapping[str, Part], piece: Piece, value: torch.Tensor
) -> Part | None:
    """Of a constant, a bias of zeros or a norm's ones: the part that another parameter of its module is."""
    module, _, own = piece.name.rpartition(".")
    beside = [part for name, part in found.items() if name.rpartition(".")[0] == module]
    for part in beside:
        name = f"{part.name.rpartition('.')[0]}.{own}" if part.name.rpartition(".")[0] else own
        whole = reference.get(name)
        if whole is None:
            continue
        if whole.shape == value.shape:
            return Part(name, (None,) * whole.dim())
        first = part.index[0] if part.index else None
        if first is not None and whole.dim() == 1 and len(first) == value.shape[0]:
            return Part(name, (first,))
    whole = reference.get(piece.name)
    if whole is None:
        return _part_by_renamed_layer(reference, found, piece, value)
    if whole.shape == value.shape:
        return Part(piece.name, (None,) * whole.dim())
    return None


def _part_by_renamed_layer(
    reference: Mapping[str, torch.Tensor], found: Mapping[str, Part], piece: Piece, value: torch.Tensor
) -> Part | None:
    """Of a layer that has another number here, as on a pipeline's later stage: as its neighbours were renamed."""
    own = piece.name.split(".")
    for depth in range(len(own) - 1, 0, -1):
        for name, part in found.items():
            here, there = name.split("."), part.name.split(".")
            if (
                here[:depth] == own[:depth]
                and len(here) > depth
                and here[depth:] == there[len(there) - len(here[depth:]) :]
            ):
                renamed = ".".join([*there[: len(there) - len(here[depth:])], *own[depth:]])
                if renamed in reference and reference[renamed].shape == value.shape:
                    return Part(renamed, (None,) * value.dim())
    return _part_by_wrapper(reference, found, piece, value)


def _part_by_wrapper(
    reference: Mapping[str, torch.Tensor], found: Mapping[str, Part], piece: Piece, value: torch.Tensor
) -> Part | None:
    """Of a layer within another one here, as norm.inner.weight: the longest name that has all but some of its parts."""
    if any(_layer_numbers(name) != _layer_numbers(part.name) for name, part in found.items()):
        return None  # layers have other numbers here
    fits = []
    for name, whole in reference.items():
        own = iter(piece.name.split("."))
        if all(one in own for one in name.split(".")) and torch.equal(whole, value):
            fits.append(name)
    longest = max((name.count(".") for name in fits), default=0)
    fits = [name for name in fits if name.count(".") == longest]
    return Part(fits[0], (None,) * value.dim()) if len(fits) == 1 else None


def _layer_numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdigit()]


@dataclass
class Assembled:
    """A parameter's tensor as the layout has it, in the reference's shape.

    ``value``: of each element what a rank has, the first of them; ``covered``: whether any has. ``apart``: the versions
    of ranks that hold the same part, by part, where they are not equal to the last bit.
    """

    value: torch.Tensor
    covered: torch.Tensor
    apart: list[tuple[Part, dict[int, torch.Tensor]]] = field(default_factory=list)


def assembled(
    shape: tuple[int, ...], holders: list[tuple[int, Part, torch.Tensor]], dtype: torch.dtype = torch.float64
) -> Assembled:
    """Puts pieces of all ranks together.

    Args:
        shape: of the reference's. holders: rank, its part, its values.
    """
    value = torch.zeros(shape, dtype=dtype)
    covered = torch.zeros(shape, dtype=torch.bool)
    by_part: dict[tuple, list[tuple[int, Part, torch.Tensor]]] = {}
    for rank, part, tensor in holders:
        by_part.setdefault(part.key(), []).append((rank, part, tensor))
    made = Assembled(value, covered)
    for same in by_part.values():
        _, part, first = same[0]
        _insert(value, part, first.to(dtype))
        _insert(covered, part, torch.ones(first.shape, dtype=torch.bool))
        if any(not torch.equal(first, tensor) for _, _, tensor in same[1:]):
            made.apart.append((part, {rank: tensor for rank, _, tensor in same}))
    return made


def _insert(whole: torch.Tensor, part: Part, tensor: torch.Tensor) -> None:
    if part.flat is not None:
        whole.reshape(-1)[part.flat : part.flat + tensor.numel()] = tensor.reshape(-1)
        return
    index = []
    for axis, places in enumerate(part.index):
        every = torch.arange(whole.shape[axis]) if places is None else places
        index.append(every.reshape([-1 if one == axis else 1 for one in range(whole.dim())]))
    if index:
        whole[tuple(index)] = tensor
    else:
        whole.copy_(tensor)


def nearly_equal(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether tensors are the same to rounding, a part of the second's largest number, and NaN in the same places."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= tolerance * scale).all()) or bool(
        torch.equal(a.isnan(), b.isnan()) and a.isnan().any()
    )
