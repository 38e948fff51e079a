"""The run that all others are held against, put together once."""

from dataclasses import dataclass
from functools import cached_property

import torch

from pardemo.prove import clipping, forward
from pardemo.prove.assembled import assembled
from pardemo.prove.facts import floors
from pardemo.prove.record import sketch
from pardemo.prove.record.facts import Piece, Tensors
from pardemo.prove.record.rounding import SHORT
from pardemo.prove.runner import ProveError, Run
from pardemo.prove.whole import Part


@dataclass
class Whole:
    """A run's parameters in whole, of one step: before and after it, and gradients. ``tied``: other names of each."""

    before: Tensors
    after: Tensors
    gradients: Tensors
    tied: dict[str, tuple[str, ...]]


#: Relative differences up to which numbers of a type are taken for equal. A sum of thousands of terms in another order
#: is off by ten or a hundred roundings; a bug is off by a factor.
TOLERANCES = {
    "float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3, "float8_e4m3fn": 3e-2, "float8_e5m2": 3e-2
}  # fmt: skip
#: By how many times what rounding otherwise has moved in the reference a layout may be off. The right layouts of
#: tests/right_forms in bf16, of two ranks and two micro-batches, are off by 2.5 times at most, and half of their
#: parameters by less than 0.4; with more of either, sums are rounded more often.
TIMES = 6.0


class Reference:
    """The reference's run, put together once for all layouts.

    Args:
        noise: of each step, by kind and parameter, the norm of what moves if short types are rounded otherwise.
    """

    def __init__(self, run: Run, tolerance: float, noise: list[dict[tuple[str, str], float]] | None = None):
        self.run, self.tolerance, self.noise = run, tolerance, noise or []
        self.order = [forward.order_of(run, step) for step in range(run.steps)]
        self.whole = [self._whole(step) for step in range(run.steps)]
        self._floors = [floors(whole.gradients) for whole in self.whole]
        self.norms = [clipping.norm(whole.gradients) for whole in self.whole]

    def allowed(self, kind: str, name: str, step: int) -> float:
        """The norm by which a parameter's gradient or update may be off since numbers of few bits are rounded."""
        return TIMES * self.noise[step].get((kind, name), 0.0) if step < len(self.noise) else 0.0

    def more_than_rounding(self, name: str, step: int) -> torch.Tensor:
        """Elements of a parameter whose gradient is no rounding: an optimizer may make anything of one that is.

        Where types are short, in none of the steps so far: Adam's moments remember.
        """
        found = torch.ones(self.whole[step].gradients[name].shape, dtype=torch.bool)
        for at in range(step + 1) if self.noise else (step,):
            gradient = self.whole[at].gradients.get(name)
            if gradient is not None:
                each = self.allowed("gradient", name, at) / max(gradient.numel(), 1) ** 0.5
                found &= gradient.abs() > max(self.tolerance_of(name) * self._floors[at][name], each)
        return found

    def tolerance_of(self, name: str) -> float:
        """The relative difference that is rounding in a parameter's own type."""
        if self._moved_nothing:
            return self.tolerance
        return self._by_type.get(name, self.tolerance)

    @cached_property
    def _by_type(self) -> dict[str, float]:
        """Of each gradient what is rounding in its type."""
        found: dict[str, float] = {}
        for rank in range(self.run.layout.ranks):
            for name, tensor in self.run.tensors(0, rank, "gradient").items():
                own = TOLERANCES.get(str(tensor.dtype).removeprefix("torch."), self.tolerance)
                found[name] = min(max(own, found.get(name, 0.0)), self.tolerance)
        return found

    @property
    def _moved_nothing(self) -> bool:
        """Whether it computes in short types where no module does, so that rounding otherwise has moved nothing."""
        short = any(SHORT.keys() & {*record.computed_in} for record in self.run.records)
        return bool(self.noise) and short and not any(by for (of, _), by in self.noise[0].items() if of == "gradient")

    def _whole(self, step: int) -> Whole:
        """All pieces where one process has all; else put together as the pieces themselves say."""
        pieces = [piece for record in self.run.records for piece in record.steps[step].pieces]
        tied = {piece.name: piece.tied for piece in pieces if piece.tied}
        before, after, gradients = (self.in_whole(step, kind) for kind in ("before", "after", "gradient"))
        return Whole(before, after, gradients, tied)

    def in_whole(self, step: int, kind: str) -> Tensors:
        """Tensors of a kind of a step, in whole, by the parameters' names."""
        holders: dict[str, list] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for rank, record in enumerate(self.run.records):
            tensors = self.run.tensors(step, rank, kind)
            for piece in record.steps[step].pieces:
                shape = tuple(tensors[piece.name].shape) if piece.name in tensors else None
                if shape is not None and len(shape) in (0, len(piece.shape)):  # or a state of another form
                    piece = sketch.scaled(piece, shape) if shape else piece  # a state may be one number
                    shapes[piece.name] = (piece.whole or piece.shape) if shape else ()
                    holders.setdefault(piece.name, []).append((rank, _own_part(piece, tensors), tensors[piece.name]))
        made = {}
        for name, some in holders.items():
            _, part, first = some[0]
            whole = all(places is None for places in part.index) and part.flat is None
            one = assembled(tuple(first.shape) if whole else shapes[name], some)
            if one.apart and kind == "before":
                raise ProveError(
                    f"the ranks of the reference, {self.run.layout.name}, hold different values of {name} in step "
                    f"{step + 1}: nobody can say which are right; choose one process for the reference"
                )
            made[name] = one.value
        return made


def noise_between(reference: Reference, rounded: Run) -> list[dict[tuple[str, str], float]]:
    """What another rounding has moved of each parameter's gradient and update, as norms, step by step."""
    noise = []
    for ours, its in zip(reference.whole, Reference(rounded, reference.tolerance).whole, strict=False):
        found = {("gradient", name): (its.gradients[name], ours.gradients[name])
                 for name in ours.gradients.keys() & its.gradients.keys()}  # fmt: skip
        found |= {("update", name): (its.after[name] - its.before[name], ours.after[name] - ours.before[name])
                  for name in ours.after.keys() & its.after.keys()}  # fmt: skip
        noise.append({key: float((a - b).norm()) for key, (a, b) in found.items()})
    return noise


def _own_part(piece: Piece, tensors: Tensors) -> Part:
    if piece.flat is not None:
        return Part(piece.name, flat=piece.flat)
    shape = tensors[piece.name].shape
    if not shape or piece.start is None or piece.whole is None:
        return Part(piece.name, (None,) * len(shape))
    index = tuple(
        None if size == of else torch.arange(begin, begin + size)
        for begin, size, of in zip(piece.start, shape, piece.whole, strict=True)
    )
    return Part(piece.name, index)
