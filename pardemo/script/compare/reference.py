"""Puts the reference run's parameters and gradients together in full, and says how far rounding may take others."""

from dataclasses import dataclass
from functools import cached_property

import torch

from pardemo.compat import dtype_name
from pardemo.script.compare.pairs import layer_scales, norm_of
from pardemo.script.compare.parameter_map import Holders, assembled, part_of_piece
from pardemo.script.compare.runs import ProveError, Run
from pardemo.script.record import rank_record
from pardemo.script.record.numbers import SHORT
from pardemo.script.record.rank_record import Tensors

#: Relative differences up to which numbers of a type are taken for equal. A sum of thousands of terms in another order
#: is off by ten or a hundred roundings; a bug is off by a factor.
TOLERANCES = {
    "float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3, "float8_e4m3fn": 3e-2, "float8_e5m2": 3e-2
}  # fmt: skip
#: By how many times what rounding otherwise has moved in the reference a layout may be off. The right layouts of
#: tests/right_forms in bf16, of two ranks and two micro-batches, are off by 2.5 times at most, and half of their
#: parameters by less than 0.4; with more of either, sums are rounded more often.
TIMES = 6.0


@dataclass
class WholeParameters:
    """A run's parameters in full: before and after one step, and their gradients. ``tied``: other names of each."""

    before: Tensors
    after: Tensors
    gradients: Tensors
    tied: dict[str, tuple[str, ...]]


class Reference:
    """The reference's run, put together once for all layouts.

    Args:
        noise: of each step, by kind and parameter, the norm of what moves if short types are rounded otherwise.
    """

    def __init__(self, run: Run, tolerance: float, noise: list[dict[tuple[str, str], float]] | None = None):
        self.run, self.tolerance, self.noise = run, tolerance, noise or []
        self.order = [order_of(run, step) for step in range(run.steps)]
        self.whole = [self._whole(step) for step in range(run.steps)]
        self._floors = [layer_scales(parameters.gradients) for parameters in self.whole]
        self.norms = [norm_of(parameters.gradients) for parameters in self.whole]

    def allowed(self, kind: str, name: str, step: int) -> float:
        """Returns the norm by which rounding to few bits may change a parameter's gradient or update."""
        return TIMES * self.noise[step].get((kind, name), 0.0) if step < len(self.noise) else 0.0

    def more_than_rounding(self, name: str, step: int) -> torch.Tensor:
        """Selects a parameter's elements whose gradient is more than rounding.

        Of a gradient that is rounding an optimizer may make anything.

        Where types are short, in none of the steps so far: Adam's moments remember.
        """
        above = torch.ones(self.whole[step].gradients[name].shape, dtype=torch.bool)
        for at in range(step + 1) if self.noise else (step,):
            gradient = self.whole[at].gradients.get(name)
            if gradient is not None:
                of_an_element = self.allowed("gradient", name, at) / max(gradient.numel(), 1) ** 0.5
                above &= gradient.abs() > max(self.tolerance_of(name) * self._floors[at][name], of_an_element)
        return above

    def tolerance_of(self, name: str) -> float:
        """Returns the relative difference that counts as rounding in a parameter's own type."""
        if self._moved_nothing:
            return self.tolerance
        return self._by_type.get(name, self.tolerance)

    @cached_property
    def _by_type(self) -> dict[str, float]:
        """Returns the relative difference that counts as rounding in each gradient's type."""
        tolerances: dict[str, float] = {}
        for rank in range(self.run.layout.ranks):
            for name, tensor in self.run.tensors(0, rank, "gradient").items():
                type_tolerance = TOLERANCES.get(dtype_name(tensor.dtype), self.tolerance)
                tolerances[name] = min(max(type_tolerance, tolerances.get(name, 0.0)), self.tolerance)
        return tolerances

    @property
    def _moved_nothing(self) -> bool:
        """Whether it computes in short types outside of all modules, so that the other rounding has changed nothing."""
        short = any(SHORT.keys() & {*record.computed_in} for record in self.run.records)
        return bool(self.noise) and short and not any(by for (key, _), by in self.noise[0].items() if key == "gradient")

    def _whole(self, step: int) -> WholeParameters:
        """Returns the full tensors: the pieces themselves where one process has all, else put together from them."""
        pieces = [piece for record in self.run.records for piece in record.steps[step].pieces]
        tied = {piece.name: piece.tied for piece in pieces if piece.tied}
        before, after, gradients = (self.in_whole(step, kind) for kind in ("before", "after", "gradient"))
        return WholeParameters(before, after, gradients, tied)

    def in_whole(self, step: int, kind: str) -> Tensors:
        """Returns the full tensors of a kind in a step, by the parameters' names."""
        holders: dict[str, Holders] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for rank, record in enumerate(self.run.records):
            tensors = self.run.tensors(step, rank, kind)
            for piece in record.steps[step].pieces:
                shape = tuple(tensors[piece.name].shape) if piece.name in tensors else None
                if shape is not None and len(shape) in (0, len(piece.shape)):  # or a state of another form
                    piece = rank_record.scale_piece(piece, shape) if shape else piece  # a state may be one number
                    part = part_of_piece(piece, piece.name, shape)
                    every = not part.is_cut and part.flat is None
                    shapes.setdefault(piece.name, shape if every else piece.whole or piece.shape)
                    holders.setdefault(piece.name, []).append((rank, part, tensors[piece.name]))
        parameters = {name: assembled(shapes[name], parts) for name, parts in holders.items()}
        if kind == "before" and (apart := [name for name, parameter in parameters.items() if parameter.apart]):
            raise ProveError(
                f"the ranks of the reference, {self.run.layout.name}, hold different values of {apart[0]} in step "
                f"{step + 1}: nobody can say which are right; choose one process for the reference"
            )
        return {name: parameter.value for name, parameter in parameters.items()}


def noise_between(reference: Reference, rounded: Run) -> list[dict[tuple[str, str], float]]:
    """Returns for each step the norms by which another rounding changed each parameter's gradient and update."""
    noise = []
    for usual, changed in zip(reference.whole, Reference(rounded, reference.tolerance).whole, strict=False):
        pairs = {("gradient", name): (changed.gradients[name], usual.gradients[name])
                 for name in usual.gradients.keys() & changed.gradients.keys()}  # fmt: skip
        pairs |= {("update", name): (changed.after[name] - changed.before[name], usual.after[name] - usual.before[name])
                  for name in usual.after.keys() & changed.after.keys()}  # fmt: skip
        noise.append({key: float((a - b).norm()) for key, (a, b) in pairs.items()})
    return noise


def order_of(run: Run, step: int) -> dict[str, int]:
    """Numbers modules in the order in which they end in the reference; a module that runs often by its last end."""
    order: dict[str, int] = {}
    for rank in range(run.layout.ranks):
        for position, call in enumerate(run.records[rank].steps[step].calls):
            order[call.module] = max(order.get(call.module, -1), position)
    return order


def tolerance_of(run: Run, double: bool) -> float:
    """Returns the relative difference that counts as rounding in this run's types."""
    types = {name for record in run.records for name in (*record.dtypes, *record.computed_in) if name in TOLERANCES}
    return max((TOLERANCES[name] for name in types), default=TOLERANCES["float64" if double else "float32"])
