"""Outputs of modules, row by row where the samples are the same: the first module from which on they part."""

from collections.abc import Iterator

import torch

from pardemo.measure.places import ROOT
from pardemo.prove.data import Data, Place
from pardemo.prove.facts import Parted
from pardemo.prove.record.facts import ModuleCall
from pardemo.prove.runner import Run


def order_of(run: Run, step: int) -> dict[str, int]:
    """Each module's place in the order in which modules end in the reference; where one runs often, its last."""
    order: dict[str, int] = {}
    for rank in range(run.layout.ranks):
        for place, call in enumerate(run.records[rank].steps[step].calls):
            order[call.module] = max(order.get(call.module, -1), place)
    return order


#: Ways to see an output as rows of samples. A flat one has the samples' tokens one after the other, in an order that
#: only the module knows: as experts do, which see the tokens that a router sends them.
BY_SAMPLES, BY_TOKENS, SHARED, FLAT, FLAT_BY_TOKENS = "[b, …]", "[s, b, …]", "[s, k]", "[b·s, k]", "[s·b, k]"


def rows(cells: torch.Tensor, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """The ways in which an output may be rows of samples, each as [b, …, k].

    Args:
        tokens: of a sample, on this rank.
    """
    found = {}
    if batch and cells.dim() >= 2:
        if cells.shape[0] == batch:
            found[BY_SAMPLES] = cells
        if cells.dim() >= 3 and cells.shape[1] == batch:
            found[BY_TOKENS] = cells.transpose(0, 1)
        if not found and cells.dim() == 2 and cells.shape[0] == tokens:
            found[SHARED] = cells.unsqueeze(0).expand(batch, -1, -1)
        if not found and cells.dim() == 2 and cells.shape[0] == batch * tokens:
            found[FLAT] = cells.reshape(batch, tokens, -1)
            found[FLAT_BY_TOKENS] = cells.reshape(tokens, batch, -1).transpose(0, 1)
    return found


class Outputs:
    """A run's outputs of one step, read once."""

    def __init__(self, run: Run, step: int, rank: int):
        self.record = run.records[rank].steps[step]
        self._tensors = run.tensors(step, rank, "output")
        self._whole = run.tensors(step, rank, "whole")
        inputs = run.tensors(step, rank, "input")
        self._tokens = [
            inputs[f"{number}/{micro.names[0]}"].shape[-1] if micro.names else 0
            for number, micro in enumerate(self.record.micro_batches)
        ]
        self.by_name = {(c.module, c.micro_batch, c.number): c for c in self.record.calls}

    def cells(self, call: ModuleCall) -> dict[str, torch.Tensor]:
        """The output as rows, in each way in which it can be seen."""
        batch = len(self.record.micro_batches[call.micro_batch].samples)
        return rows(self._tensors[call.key.removeprefix("output/")], batch, self._tokens[call.micro_batch])

    def whole(self, call: ModuleCall) -> dict[str, torch.Tensor]:
        """Numbers without a fraction that went in, as rows."""
        tensor = self._whole.get(call.key.removeprefix("output/"))
        batch = len(self.record.micro_batches[call.micro_batch].samples)
        return rows(tensor.unsqueeze(-1), batch, self._tokens[call.micro_batch]) if tensor is not None else {}

    def all_of(self, module: str, width: int) -> torch.Tensor:
        """All rows that a module has given in this step, in no order. [rows, 3]"""
        some = [self._tensors[one.key.removeprefix("output/")] for one in self.record.calls
                if one.module == module and one.shape[-1:] == (width,)]  # fmt: skip
        return torch.cat([one.reshape(-1, one.shape[-1]) for one in some])


def parted(
    reference: Run,
    other: Run,
    step: int,
    data: Data,
    renamed: dict[int, dict[str, str]],
    cut: dict[int, set[str]],
    missing: dict[int, set[str]],
    tolerance: float,
) -> tuple[list[Parted], set[str]]:
    """Modules whose outputs are not the reference's, by the order in which they ran, and the names of those whose are.

    What was compared and is in neither is a part of an output, as the sum of one rank's share is.

    Args:
        renamed: of each rank, modules whose name in the reference is another.
        cut: of each rank, modules with a parameter of which it has a part: their output may be a part, too.
        missing: of each rank the reference's parameters of which it has nothing: what they are in is no whole module.
    """
    truth = Outputs(reference, step, 0)
    found: list[Parted] = []
    equal: dict[str, bool] = {}
    for rank in range(other.layout.ranks):
        ours = Outputs(other, step, rank)
        own, absent = renamed.get(rank, {}), missing.get(rank, set())
        names = {call.key: _name(call.module, own) for call in ours.record.calls}
        seen = [one for call in ours.record.calls if _is_whole(names[call.key], call.kind, absent)
                if (one := _call(ours, truth, call, rank, data, names[call.key], tolerance)) is not None]  # fmt: skip
        for one in seen:
            equal[one.name] = one.equal and equal.get(one.name, True)
        found += _from_the_first(list(_judged(seen, ours, truth, rank, cut)))
    return sorted(found, key=lambda one: one.order), {name for name, always in equal.items() if always}


def _name(module: str, renamed: dict[str, str]) -> str:
    """A module's name in the reference: its own, or as a module around it is called there."""
    around, inside = module, ""
    while around:
        if around in renamed:
            return renamed[around] + inside
        around, _, last = around.rpartition(".")
        inside = f".{last}{inside}"
    return module


def _is_whole(name: str, kind: str, missing: set[str]) -> bool:
    """Whether a module has all of its parameters here: a container that is cut over stages gives something else."""
    model = name in (ROOT, kind)  # which may be called by its class
    return not any(model or one.startswith(f"{name}.") for one in missing)


class _Seen:
    """A module's call, compared: ``equal``, and by how much not."""

    def __init__(self, call: ModuleCall, name: str, difference: torch.Tensor, reference: torch.Tensor, equal: bool,
                 inputs: bool | None, rows_equal: torch.Tensor):  # fmt: skip
        self.call, self.name, self.difference, self.reference = call, name, difference, reference
        self.equal, self.inputs, self.rows_equal = equal, inputs, rows_equal


def _call(
    ours: Outputs,
    truth: Outputs,
    call: ModuleCall,
    rank: int,
    data: Data,
    name: str,
    tolerance: float,
) -> _Seen | None:
    """A call beside those of the reference's module ``name``; None where they cannot be compared: it has none such."""
    micro = ours.record.micro_batches[call.micro_batch]
    places = [data.places.get((rank, call.micro_batch, row)) for row in range(len(micro.samples))]
    if not places or any(place is None for place in places):
        return None
    best: _Seen | None = None
    for way, own in ours.cells(call).items():
        wanted = _wanted(truth, name, call, [place for place in places if place], way, own.shape[1:], False)
        if wanted is None or not wanted.numel():  # as of an expert without tokens
            continue
        difference = own - wanted
        scale = wanted.abs().max().item() or 1.0
        off = difference.abs().amax(dim=tuple(range(1, difference.dim()))) > tolerance * scale * 10
        inputs = None
        if (whole := ours.whole(call).get(way)) is not None:
            theirs = _wanted(truth, name, call, [p for p in places if p], way, whole.shape[1:], True)
            inputs = None if theirs is None else bool(torch.equal(whole, theirs))
        seen = _Seen(call, name, difference, wanted, not bool(off.any()), inputs, ~off)
        dispatched = way in (FLAT, FLAT_BY_TOKENS) and not seen.equal
        if dispatched and _all_there(own, truth.all_of(name, call.shape[-1]), scale, tolerance):
            continue
        if best is None or seen.equal:
            best = seen
    return best


def _all_there(own: torch.Tensor, theirs: torch.Tensor, scale: float, tolerance: float) -> bool:
    """Whether each of our rows is one of the reference's, wherever: the same tokens in another order."""
    parts = own.reshape(-1, own.shape[-1]).split(256)
    return all(
        bool(((part[:, None] - theirs[None]).abs().amax(-1).amin(1) <= tolerance * scale * 10).all()) for part in parts
    )


def _wanted(
    truth: Outputs, name: str, call: ModuleCall, places: list[Place], way: str, shape: torch.Size, whole: bool
) -> torch.Tensor | None:
    """The reference's rows for these places, in the shape of ours; None where it has no such output."""
    found = []
    by_micro: dict[int, torch.Tensor | None] = {}
    for place in places:
        if place.micro_batch not in by_micro:
            its = truth.by_name.get((name, place.micro_batch, call.number))
            seen = {} if its is None else truth.whole(its) if whole else truth.cells(its)
            width = its is not None and its.shape[-1:] == call.shape[-1:]
            by_micro[place.micro_batch] = seen.get(way) if width or whole else None
        theirs = by_micro[place.micro_batch]
        if theirs is None:
            return None
        row = theirs[place.row]
        if place.tokens is not None and row.dim() == len(shape):
            for axis, (of, own) in enumerate(zip(row.shape, shape, strict=True)):
                if of == place.length and own == len(place.tokens) != of:
                    row = row.index_select(axis, place.tokens)
        if row.shape != shape:
            return None
        found.append(row)
    return torch.stack(found)


def _judged(
    seen: list[_Seen], ours: Outputs, truth: Outputs, rank: int, cut: dict[int, set[str]]
) -> Iterator[tuple[bool, Parted]]:
    for one in seen:
        name = one.call.module
        inside = "" if name == "(root)" else name + "."
        strict = not any(module == name or module.startswith(inside) for module in cut.get(rank, set()))
        order = truth.record.calls.index(truth.by_name[one.name, _micro(truth, one), one.call.number])
        yield one.equal, Parted(
            rank, one.name, one.call.kind, order, strict, one.difference.reshape(-1, one.difference.shape[-1]),
            one.reference.reshape(-1, one.reference.shape[-1]), one.inputs, one.rows_equal,
        )  # fmt: skip


def _micro(truth: Outputs, one: _Seen) -> int:
    return next(m for (name, m, number) in truth.by_name if name == one.name and number == one.call.number)


def _from_the_first(judged: list[tuple[bool, Parted]]) -> list[Parted]:
    """What does not come right again later: a partial sum of a module that is cut does."""
    if all(equal for equal, _ in judged):
        return []
    strict = [place for place, (equal, one) in enumerate(judged) if not equal and one.strict]
    last = max((place for place, (equal, _) in enumerate(judged) if equal), default=-1)
    after = [place for place in range(last + 1, len(judged)) if not judged[place][0]]
    first = min([*strict, *after], default=None)
    if first is None:
        return []
    if not strict and len(judged) - 1 not in after:
        return []
    return [
        one for place, (equal, one) in enumerate(judged) if not equal and (place == first or one.strict or place > last)
    ]
