"""How far a rank's losses, gradients and parameters may be from those of one process, and how far they are."""

import copy
import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from pardemo.soak.layouts.case import Case

#: How many eps apart two results may be, of the size of what is compared. fp64 and fp32: sums of some hundred terms in
#: another order, through some ten layers, are tens of eps apart; 1000 eps, 1e-4 in fp32, is far from what a missing
#: or doubled contribution would change. bf16 (eps 2⁻⁷): every operation rounds, on both sides, so that they are a few
#: eps apart; 12 eps is a tenth, and a contribution that is missing changes a quarter and more.
ROUNDINGS = {"fp64": 1000, "fp32": 1000, "bf16": 12}
#: A tensor that is zero but for rounding (a key's bias has no gradient) is measured by the others: this share of all.
SHARE = 0.02
Model = TypeVar("Model", bound=nn.Module)


class Comparison:
    """Keeps the worst of what it is told to compare: ``worst``, error over bound, and ``what`` that was."""

    def __init__(self, case: Case):
        self.worst, self.what = 0.0, "nothing"
        self._eps, self._rounding = case.eps, case.eps * ROUNDINGS[case.dtype]
        self._steps = case.steps

    def losses(self, found: Sequence[float | None], expected: Sequence[float]) -> None:
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if ours is not None:
                self._note(f"loss of step {step}", abs(ours - theirs), self._rounding * (step + 1) * abs(theirs))

    def gradients(self, found: Sequence[nn.Module], expected: Sequence[nn.Module]) -> None:
        """Models whose values are gradients."""
        whole = _norm(_values(expected).values())
        for name, theirs in _values(expected).items():
            error, size = (_values(found)[name] - theirs).norm().item(), theirs.norm().item()
            self._note(f"gradient of {name}", error, self._rounding * (size + SHARE * whole))

    def parameters(
        self, found: Sequence[nn.Module], expected: Sequence[nn.Module], initial: Sequence[nn.Module]
    ) -> None:
        """Measured by how far training has moved them, and by the rounding of the values that are kept."""
        self._moved("parameter", found, expected, initial, self._eps)

    def masters(self, found: Sequence[nn.Module], expected: Sequence[nn.Module], initial: Sequence[nn.Module]) -> None:
        """Of ZeRO's optimizer, in fp32. In bf16 a step is less than the parameters' own rounding, which an optimizer
        that does nothing would pass: here it would be the whole of what training has moved."""
        self._moved("master of", found, expected, initial, torch.finfo(torch.float32).eps)

    def _moved(
        self,
        of: str,
        found: Sequence[nn.Module],
        expected: Sequence[nn.Module],
        initial: Sequence[nn.Module],
        eps: float,
    ) -> None:
        before, after, ours = _values(initial), _values(expected), _values(found)
        moved = {name: (after[name] - before[name]).norm().item() for name in after}
        whole = sum(m**2 for m in moved.values()) ** 0.5
        for name, theirs in after.items():
            kept = eps * theirs.norm().item()
            bound = self._steps * (self._rounding * (moved[name] + SHARE * whole) + kept)
            self._note(f"{of} {name}", (ours[name] - theirs).norm().item(), bound)

    def _note(self, what: str, error: float, bound: float) -> None:
        ratio = error / bound if bound else (0.0 if error == 0 else math.inf)
        ratio = math.inf if math.isnan(ratio) else ratio  # no number at all is the worst
        if ratio > self.worst:
            self.worst, self.what = ratio, what


def gradients_as_model(model: Model) -> Model:
    """A copy whose values are the gradients; zero where there is none."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for value, parameter in zip(copied.parameters(), model.parameters(), strict=True):
            value.grad = None
            value.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return copied


def _values(chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    several = len(chunks) > 1
    return {
        f"chunk {i}, {name}" if several else name: value.detach().double()
        for i, chunk in enumerate(chunks)
        for name, value in chunk.named_parameters()
    }


def _norm(tensors) -> float:
    return sum(t.square().sum().item() for t in tensors) ** 0.5
