"""Maps each rank's pieces to the reference's parameters, and puts parameters together from pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from pardemo.script.compare.closeness import within_rounding
from pardemo.script.record.rank_record import ParameterShard

#: A row that so many others resemble is nothing to go by: zeros, and other constants.
ALIKE = 16


@dataclass(frozen=True)
class Strip:
    """The rows of a piece that are one parameter's.

    ``number``: which of the piece's strips. ``rows``: of the piece, along ``axis``. ``name``: the reference's, and
    ``positions``: which of its rows they are, in order; None where they are all of them.
    """

    number: int
    axis: int
    rows: torch.Tensor
    name: str
    positions: torch.Tensor | None

    def cut_from(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cuts the strip from another tensor of the piece's shape."""
        return tensor.index_select(self.axis, self.rows)

    def name_in(self, piece: str) -> str:
        """Returns the strip's name among pieces."""
        return f"{piece}[{self.number}]"

    def as_piece(self, piece: ParameterShard) -> ParameterShard:
        """Returns the strip as a piece of its own."""
        shape = (*piece.shape[: self.axis], len(self.rows), *piece.shape[self.axis + 1 :])
        tied = tuple(map(self.name_in, piece.tied))
        return replace(piece, name=self.name_in(piece.name), shape=shape, whole=None, start=None, flat=None, tied=tied)

    def as_part(self, dims: int) -> "Part":
        """Returns its position in the parameter; of a piece's only strip in the order of the piece's rows."""
        return Part(self.name, tuple(self.positions if axis == self.axis else None for axis in range(dims)))


class ParameterIndex:
    """An index of the reference's parameters by their values, by their rows and by their columns."""

    def __init__(self, reference: Mapping[str, torch.Tensor], tolerance: float):
        self._reference, self._tolerance = reference, tolerance
        self._tables: dict[tuple[str, int, tuple[int, ...]], _RowTable] = {}

    def find(self, value: torch.Tensor, name: str = "") -> list[Strip]:
        """Returns the strips that make a tensor of these values; none where some row's parameter is not known.

        ``name``: of the one parameter that it may be of; of any by default.
        """
        among = {name: self._reference[name]} if name else self._reference
        same = (
            [] if _is_constant(value) else [key for key in among if within_rounding(among[key], value, self._tolerance)]
        )
        if len(same) == 1:
            return [Strip(0, 0, torch.arange(len(value)), same[0], None)]
        for axis in range(value.dim()) if value.numel() else ():
            others = (*value.shape[:axis], *value.shape[axis + 1 :])
            if (name, axis, others) not in self._tables:
                self._tables[name, axis, others] = _RowTable(among, axis, others, self._tolerance)
            table = self._tables[name, axis, others]
            positions = table.positions(value.movedim(axis, 0).reshape(value.shape[axis], -1))
            if positions is not None:
                return table.strips(positions)
        return []

    def beside(self, strips: Sequence[Strip], name: str, value: torch.Tensor) -> list[Strip]:
        """Returns the strips of a layer's bias by those of its weight; none where the values differ.

        Args:
            name: the parameter's in its module, which is the same in the reference.
        """
        if any(strip.axis for strip in strips) or sum(len(strip.rows) for strip in strips) != len(value):
            return []
        renamed = [replace(strip, name=_beside(strip.name, name)) for strip in strips]
        for strip in renamed:
            parameter = self._reference.get(strip.name)
            if parameter is None or parameter.dim() != value.dim() or len(parameter) < len(strip.rows):
                return []
            part = parameter if strip.positions is None else parameter.index_select(0, strip.positions)
            if not within_rounding(part, strip.cut_from(value), self._tolerance, parameter):
                return []
        return renamed


class _RowTable:
    """Rows of all parameters of a shape, along an axis, in the order of one projection: equal rows have an equal one.

    A row's position is counted over all parameters, one after the other.
    """

    def __init__(self, reference: Mapping[str, torch.Tensor], axis: int, others: tuple[int, ...], tolerance: float):
        self._axis, self._tolerance = axis, tolerance
        self._names: list[str] = []
        self._wholes: list[torch.Tensor] = []
        for name, parameter in reference.items():
            if parameter.dim() == len(others) + 1 and (*parameter.shape[:axis], *parameter.shape[axis + 1 :]) == others:
                self._names.append(name)
                self._wholes.append(parameter.movedim(axis, 0).reshape(parameter.shape[axis], -1))
        sizes = torch.tensor([0, *(len(rows) for rows in self._wholes)])
        self._begins = sizes.cumsum(0)
        width = torch.Size(others).numel()
        self._weights = torch.randn(width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        numbers = torch.cat([rows.double() @ self._weights for rows in self._wholes] or [torch.zeros(0)])
        self._sorted, self._order = numbers.double().sort()
        self._scales = torch.tensor([float(rows.abs().max()) if len(rows) else 0.0 for rows in self._wholes])
        # roundings add up as random numbers do, and eight times that is more than they ever are
        largest = max(self._scales.tolist(), default=0.0)
        self._window = 8 * tolerance * largest * float(self._weights.norm())

    def positions(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Returns each row's position, all of them different; None where a row has none or two."""
        if not len(rows) or not rows.numel() or not len(self._sorted):
            return None
        numbers = rows.double() @ self._weights
        first = torch.searchsorted(self._sorted, numbers - self._window)
        many = torch.searchsorted(self._sorted, numbers + self._window, right=True) - first
        if bool(((many == 0) | (many > ALIKE)).any()):
            return None
        row = torch.arange(len(rows)).repeat_interleave(many)
        within = torch.arange(len(row)) - (many.cumsum(0) - many).repeat_interleave(many)
        position = self._order[first.repeat_interleave(many) + within]
        equal = self._equal(rows, row, position)
        row, position = row[equal], position[equal]
        matches = torch.bincount(row, minlength=len(rows))
        if bool((matches == 0).any()):
            return None
        chosen = self._one_of(position.split(matches.tolist())) if bool((matches > 1).any()) else position
        return chosen if chosen is not None and len(chosen.unique()) == len(chosen) else None

    def _equal(self, rows: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Whether these rows are those at these positions."""
        equal = torch.zeros(len(row), dtype=torch.bool)
        parameter = self._parameter(position)
        for number in parameter.unique().tolist():
            in_it = parameter == number
            there = self._wholes[number].index_select(0, position[in_it] - self._begins[number])
            off = (rows.index_select(0, row[in_it]) - there).abs().amax(1)
            equal[in_it] = off <= self._tolerance * self._scales[number]
        return equal

    def _parameter(self, position: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(self._begins, position, right=True) - 1

    def _one_of(self, positions: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Chooses between several positions of a row, as of a bias's numbers: the one behind a neighbour's."""
        begins = set(self._begins.tolist())
        known = [int(row[0]) if len(row) == 1 else None for row in positions]
        ways = []
        for step in (1, -1):
            way = list(known)
            for at in range(len(way))[::step]:
                before = way[at - step] if 0 <= at - step < len(way) else None
                if way[at] is None and before is not None:
                    after = before + step
                    same = (after if step > 0 else before) not in begins  # of the same parameter
                    way[at] = after if same and after in positions[at].tolist() else None
            ways.append(way)
        both = [{position for position in pair if position is not None} for pair in zip(*ways, strict=True)]
        return torch.tensor([next(iter(row)) for row in both]) if all(len(row) == 1 for row in both) else None

    def strips(self, positions: torch.Tensor) -> list[Strip]:
        """Returns the rows of each parameter, in the order in which the piece has the parameters."""
        parameter = self._parameter(positions)
        strips = []
        for number, which in enumerate(dict.fromkeys(parameter.tolist())):
            rows = (parameter == which).nonzero().reshape(-1)
            numbers = positions[rows] - self._begins[which]
            if len(rows) < len(positions):
                numbers, order = numbers.sort()
                rows = rows[order]
            every = torch.equal(numbers, torch.arange(len(self._wholes[which])))
            strips.append(Strip(number, self._axis, rows, self._names[which], None if every else numbers))
        return strips


@dataclass(frozen=True)
class Part:
    """The position of a rank's piece in the reference's parameter.

    ``name``: the reference's. ``index``: of each axis the positions, or None for all of it; ``flat``: first element of
    a range instead.
    """

    name: str
    index: tuple[torch.Tensor | None, ...] = ()
    flat: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it has some of the positions of an axis; of a flat range nothing says."""
        return any(positions is not None for positions in self.index)

    def key(self) -> tuple:
        """Returns a key that is equal for pieces with the same elements."""
        positions = tuple(None if axis is None else tuple(axis.tolist()) for axis in self.index)
        return self.name, positions, self.flat

    def cut_from(self, parameter: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Cuts the same part from another whole tensor. [shape]"""
        if self.flat is not None:
            count = torch.Size(shape).numel()
            return parameter.reshape(-1)[self.flat : self.flat + count].reshape(shape)
        for axis, positions in enumerate(self.index):
            if positions is not None:
                parameter = parameter.index_select(axis, positions)
        return parameter


def part_of_piece(piece: ParameterShard, name: str, shape: tuple[int, ...]) -> Part:
    """Returns the part of the parameter ``name`` that a piece states, or all of it; ``shape``: of its tensor."""
    if piece.flat is not None:
        return Part(name, flat=piece.flat)
    if not shape or piece.start is None or piece.whole is None:
        return Part(name, (None,) * len(shape))
    boxes = zip(piece.start, shape, piece.whole, strict=True)
    return Part(name, tuple(None if size == full else torch.arange(at, at + size) for at, size, full in boxes))


@dataclass
class ParameterMap:
    """Maps each rank's pieces to the reference's parameters of which they are a part.

    ``parts``: by rank and the piece's own name. ``unknown``: pieces of which nothing says it, with the reason.
    ``different``: names whose values differ at the begin though shape and name are the same. ``strips``: by rank and
    name, pieces that are several parameters' in one; ``parts`` has the strips of these. ``moved``: of a name that the
    framework says a piece is cut from, the other parameter of the reference that has the piece's values.
    """

    parts: dict[int, dict[str, Part]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    different: set[str] = field(default_factory=set)
    moved: dict[str, str] = field(default_factory=dict)
    strips: dict[int, dict[str, list[Strip]]] = field(default_factory=dict)

    def parameters_of_pieces(self) -> dict[str, set[str]]:
        """Returns by each piece's name the reference's parameters of which it has a part: of a fused one several."""
        parameters: dict[str, set[str]] = {}
        for rank, parts in self.parts.items():
            pieces = {strip.name_in(name): name for name, strips in self.strips[rank].items() for strip in strips}
            for name, part in parts.items():
                parameters.setdefault(pieces.get(name, name), set()).add(part.name)
        return parameters

    def leave_out_unused(self, rank: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Leaves out pieces without a gradient, where another piece of the rank is the same part and has one.

        A stage of Megatron-core's with a head and a table that are tied has a head's weight beside, which nothing uses.
        """
        by_part: dict[tuple, list[str]] = {}
        for name, part in self.parts[rank].items():
            by_part.setdefault(part.key(), []).append(name)
        for names in by_part.values():
            used = [name for name in names if name in gradients and bool(gradients[name].any())]
            for name in set(names) - set(used) if used else ():
                del self.parts[rank][name]


def map_parameters(
    reference: Mapping[str, torch.Tensor],
    pieces: Mapping[int, list[tuple[ParameterShard, torch.Tensor]]],
    tied: Mapping[str, str],
    tolerance: float,
) -> ParameterMap:
    """Finds for every piece of every rank its part of the reference.

    By the framework's own word, by the name of a parameter that has these values, by the values alone, or where these
    are constant by the parts of the module's other parameters, in this order.

    Args:
        reference: whole parameters before the first step, by name. tied: other names of them.
        pieces: of each rank what it holds, with its values before the first step.
        tolerance: relative, up to which values are the same: frameworks may have kept them in another type.
    """
    maps = ParameterMap()
    index = ParameterIndex(reference, tolerance)
    for rank, rank_pieces in pieces.items():
        parts, cut = maps.parts.setdefault(rank, {}), maps.strips.setdefault(rank, {})
        names = {piece.name: [tied.get(name, name) for name in (piece.name, *piece.tied)] for piece, _ in rank_pieces}
        unmatched, constant = [], []
        for piece, value in rank_pieces:
            name = next((name for name in names[piece.name] if name in reference), "")
            part = _stated_part(reference.get(name), piece, name, value, tolerance, maps)
            if part is not None:
                parts[piece.name] = part
            else:
                unmatched.append((piece, value, name))
        for piece, value, name in sorted(unmatched, key=lambda entry: -entry[1].dim()):  # a bias is cut as its weight
            strips = [] if piece.flat is not None else _strips(index, cut, piece.name, value, name)
            alike = bool(name) and reference[name].shape == value.shape
            if len(strips) == 1:
                part = parts[piece.name] = strips[0].as_part(value.dim())
                # a stage's layer 0 may well be the reference's layer 2
                if _is_box(piece, reference.get(name)) and not _is_called(part.name, names[piece.name]):
                    maps.moved.setdefault(name, part.name)
            elif strips and not alike:
                cut[piece.name] = strips
                parts |= {strip.name_in(piece.name): strip.as_part(value.dim()) for strip in strips}
            else:
                if alike and not (_is_constant(value) and _is_constant(reference[name])):
                    maps.different.add(name)
                if alike and not _is_constant(value):
                    parts[piece.name] = Part(name, (None,) * value.dim())
                else:
                    constant.append((piece, value))
        for piece, value in constant:
            by_name = _part_by_name(reference, parts, piece.name, value)
            if by_name is None:
                maps.unknown[piece.name] = f"shape {list(piece.shape)}, and no part of the reference has its values"
            else:
                parts[piece.name] = by_name
    return maps


def _is_box(piece: ParameterShard, parameter: torch.Tensor | None) -> bool:
    """Whether the framework says which box of a parameter a piece is."""
    return parameter is not None and piece.start is not None and piece.whole == tuple(parameter.shape)


def _stated_part(
    parameter: torch.Tensor | None, piece: ParameterShard, name: str, value: torch.Tensor, tolerance: float,
    maps: ParameterMap,
) -> Part | None:  # fmt: skip
    """Returns the part that the framework states, or all of the parameter of this name, where the values agree."""
    if parameter is None:
        return None
    if (is_flat := piece.flat is not None and piece.whole == tuple(parameter.shape)) or _is_box(piece, parameter):
        part = part_of_piece(piece, name, tuple(value.shape))
        same = within_rounding(part.cut_from(parameter, tuple(value.shape)), value, tolerance)
        if is_flat and not same:
            maps.different.add(name)
        if is_flat or same:
            return part
    return Part(name, (None,) * value.dim()) if within_rounding(parameter, value, tolerance) else None


def _strips(
    index: ParameterIndex, cut: Mapping[str, list[Strip]], piece: str, value: torch.Tensor, name: str
) -> list[Strip]:
    """Finds the strips of a piece: of the parameter of its name, as a bias by its weight's, or of any parameters."""
    if name and not _is_constant(value) and (strips := index.find(value, name)):
        return strips
    module, _, attribute = piece.rpartition(".")
    for weight, strips in cut.items() if value.dim() == 1 else ():
        if weight.rpartition(".")[0] == module and (strips := index.beside(strips, attribute, value)):
            return strips
    return index.find(value)


def _is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or bool((tensor == tensor.reshape(-1)[0]).all())


def _is_called(name: str, names: Sequence[str]) -> bool:
    """Whether a parameter's name and its module's are those of one of the names, wherever that stands."""
    return name.split(".")[-2:] in [other.split(".")[-2:] for other in names]


def _beside(name: str, other: str) -> str:
    """Returns the name of another parameter of a parameter's module."""
    return f"{name.rpartition('.')[0]}.{other}".lstrip(".")


def renamed_modules(parts: Mapping[str, Part]) -> dict[str, str]:
    """Returns modules' names in the reference, and those of modules around them, as far as all their parts agree."""
    renamed: dict[str, set[str]] = {}
    for name, part in parts.items():
        here, there = name.split(".")[:-1], part.name.split(".")[:-1]
        while here and there:
            renamed.setdefault(".".join(here), set()).add(".".join(there))
            if here[-1] != there[-1] and not (here[-1].isdigit() and there[-1].isdigit()):
                break
            here, there = here[:-1], there[:-1]
    return {name: next(iter(names)) for name, names in renamed.items() if len(names) == 1}


def reference_name(module: str, renamed: Mapping[str, str]) -> str:
    """Returns a module's name in the reference: its own, or as a module around it is called there."""
    around, inside = module, ""
    while around:
        if around in renamed:
            return renamed[around] + inside
        around, _, last = around.rpartition(".")
        inside = f".{last}{inside}"
    return module


def _part_by_name(
    reference: Mapping[str, torch.Tensor], parts: Mapping[str, Part], piece: str, value: torch.Tensor
) -> Part | None:
    """Finds the part of a constant, a bias of zeros or a norm's ones: the one that another parameter of its module is.

    Else the parameter of its name; or of that of a layer that has another number here, as on a pipeline's later stage.
    """
    module, _, attribute = piece.rpartition(".")
    siblings = [part for name, part in parts.items() if name.rpartition(".")[0] == module]
    every = (None,) * value.dim()
    renamed = f"{reference_name(module, renamed_modules(parts))}.{attribute}".lstrip(".")
    for name, part in [(_beside(part.name, attribute), part) for part in siblings] + [(piece, None), (renamed, None)]:
        if name in reference and reference[name].shape == value.shape:
            return Part(name, every)
        rows = part.index[0] if part is not None and part.index else None
        if name in reference and rows is not None and reference[name].dim() == 1 and rows.shape == value.shape:
            return Part(name, (rows,))
    if any(_layer_numbers(name) != _layer_numbers(part.name) for name, part in parts.items()):
        return None  # layers have other numbers here
    # a layer within another one here, as norm.inner.weight: the longest name that has all but some of its parts
    fits = [name for name in reference if _is_within(name, piece) and torch.equal(reference[name], value)]
    longest = max((name.count(".") for name in fits), default=0)
    fits = [name for name in fits if name.count(".") == longest]
    return Part(fits[0], every) if len(fits) == 1 else None


def _is_within(name: str, longer: str) -> bool:
    """Whether all parts of a name are parts of a longer one, in their order."""
    others = iter(longer.split("."))
    return all(part in others for part in name.split("."))


def _layer_numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdigit()]


#: Ranks that have parts of a parameter: rank, its part, its values.
Holders = list[tuple[int, Part, torch.Tensor]]


@dataclass
class Assembled:
    """A parameter's tensor as the layout has it, put together in the reference's shape.

    ``value``: of each element what a rank has, the first of them; ``covered``: whether any has. ``apart``: the versions
    of ranks that hold the same part, by part, where they are not equal to the last bit. ``holders``: rank, its part,
    its values.
    """

    value: torch.Tensor
    covered: torch.Tensor
    apart: list[tuple[Part, dict[int, torch.Tensor]]]
    holders: Holders


def assembled(shape: tuple[int, ...], holders: Holders) -> Assembled:
    """Puts pieces of all ranks together, in fp64.

    Args:
        shape: of the reference's. holders: rank, its part, its values.
    """
    whole = Assembled(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool), [], holders)
    by_part: dict[tuple, Holders] = {}
    for holder in holders:
        by_part.setdefault(holder[1].key(), []).append(holder)
    for same in by_part.values():
        _, part, tensor = same[0]
        _insert(whole.value, part, tensor.double())
        _insert(whole.covered, part, torch.ones(tensor.shape, dtype=torch.bool))
        if any(not torch.equal(tensor, other) for _, _, other in same):
            whole.apart.append((part, {rank: other for rank, _, other in same}))
    return whole


def _insert(parameter: torch.Tensor, part: Part, tensor: torch.Tensor) -> None:
    if part.flat is not None:
        parameter.reshape(-1)[part.flat : part.flat + tensor.numel()] = tensor.reshape(-1)
        return
    positions = [torch.arange(size) if at is None else at for size, at in zip(parameter.shape, part.index, strict=True)]
    parameter[torch.meshgrid(*positions, indexing="ij") if positions else ...] = tensor
