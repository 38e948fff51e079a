"""Compares two versions of a parameter's gradient or update, to rounding."""

import math
from dataclasses import dataclass, field

import torch

from pardemo.script.compare.parameter_map import Part


@dataclass
class Pair:
    """A parameter's gradient or update in the reference and in the layout.

    ``factor``: c of the best c · reference. ``rest``: ‖candidate − c · reference‖ / ‖candidate‖. ``off``: ‖candidate −
    reference‖ by the tolerated: above 1 they differ. ``apart``: versions of ranks that hold the same part and are
    not equal.
    """

    name: str
    reference: torch.Tensor
    candidate: torch.Tensor
    covered: torch.Tensor
    factor: float
    rest: float
    off: float
    apart: list[tuple[Part, dict[int, torch.Tensor]]] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether they are the same to rounding."""
        return self.off <= 1


def compare_pair(
    name: str,
    reference: torch.Tensor,
    candidate: torch.Tensor,
    covered: torch.Tensor,
    floor: float,
    tolerance: float,
    apart: list[tuple[Part, dict[int, torch.Tensor]]],
    noise: float = 0.0,
) -> Pair:
    """Compares the covered elements of two tensors.

    Args:
        floor: the root mean square of the layer's: a gradient that is zero but for rounding is judged by it.
        tolerance: of rounding, relative. noise: a norm up to which any difference is rounding.
    """
    a, b = reference[covered].double(), candidate[covered].double()
    square, size = float(a @ a), a.numel()
    factor = float(a @ b) / square if square > 0 else float("nan")
    norm = float(b.norm())
    rest = float((b - factor * a).norm()) / norm if norm > 0 and square > 0 else 0.0 if norm == 0 else 1.0
    allowed = max(tolerance * max(square**0.5, floor * size**0.5), noise)
    difference = float((b - a).norm())
    off = difference / allowed if allowed > 0 else (0.0 if difference == 0 else float("inf"))
    if not torch.isfinite(b).all():
        factor, rest, off = float("nan"), float("nan"), float("inf")
    return Pair(name, reference, candidate, covered, factor, rest, off, apart)


def layer_of(name: str) -> str:
    """Returns a parameter's layer: its name up to the last number in it, or its first part."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else parts[0]


def layer_scales(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the largest root mean square of each layer's parameters, of the whole model's where a layer has one."""
    sizes = {name: float(t.double().norm()) / max(t.numel(), 1) ** 0.5 for name, t in tensors.items()}
    layers: dict[str, list[float]] = {}
    for name, size in sizes.items():
        layers.setdefault(layer_of(name), []).append(size)
    most = max(sizes.values(), default=0.0)
    return {name: max(layers[layer_of(name)]) if len(layers[layer_of(name)]) > 1 else most for name in tensors}


def norm_of(tensors: dict[str, torch.Tensor]) -> float:
    """Returns the norm of all tensors together."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))
