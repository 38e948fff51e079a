"""What a layout and the reference have and have not in common in one step: the facts that causes are judged by."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from pardemo.prove.layouts import Layout
from pardemo.prove.whole import Part


@dataclass
class Pair:
    """A parameter's gradient or update: the reference's and the layout's.

    ``factor``: c of the best c · reference. ``rest``: ‖ours − c · reference‖ / ‖ours‖. ``off``: ‖ours − reference‖ by
    the tolerated: above 1 they differ. ``apart``: versions of ranks that hold the same part and are not equal.
    """

    name: str
    reference: torch.Tensor
    ours: torch.Tensor
    covered: torch.Tensor
    factor: float
    rest: float
    off: float
    apart: list[tuple[Part, dict[int, torch.Tensor]]] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether they are the same to rounding."""
        return self.off <= 1


@dataclass(frozen=True)
class Parted:
    """A module whose output is not the reference's, at one rank. ``strict``: none of its parameters is cut.

    ``difference``: of the two projections, where a constant is added everywhere it is the same in all. [cells, 3]
    ``whole_inputs``: whether numbers that went in, as positions do, are the reference's; None where none did.
    """

    rank: int
    module: str
    kind: str
    order: int
    strict: bool
    difference: torch.Tensor
    reference: torch.Tensor
    whole_inputs: bool | None
    rows_equal: torch.Tensor


@dataclass(frozen=True)
class Finding:
    """What is not as the reference's, in one layout from one step on.

    ``cause``: a short name, or empty where nobody knows. ``why``: the sentence for the reader. ``factor`` and ``rest``:
    of gradients or of what the finding is about. ``parameters``: the reference's names. ``module``: the first that is
    wrong, in the order of execution forwards, then backwards.
    """

    layout: str
    step: int
    what: str
    cause: str
    why: str
    factor: float | None = None
    rest: float | None = None
    parameters: tuple[str, ...] = ()
    module: str = ""


@dataclass
class Facts:
    """One layout's step beside the reference's.

    ``order``: modules as they run in the reference, by their number. ``tied``: parameters' other names. ``cut``: those
    of which some rank has a part. ``holders``: how many ranks hold each. ``together``: those whose gradients are the
    same on all ranks when the optimizer steps, if they were clipped before. ``names``: of each rank and parameter the
    names under which the rank has it, several where it is tied there. ``norms``: of the reference's whole
    gradient in each step. ``moved``: of parameters whose pieces have the values of another one, that one.
    ``accumulated``: of each parameter the gradients that it had after each micro-batch but the last, added up.
    ``optimizer``: the class of the reference's.
    """

    layout: Layout
    step: int
    tolerance: float
    order: dict[str, int]
    gradients: dict[str, Pair] = field(default_factory=dict)
    updates: dict[str, Pair] = field(default_factory=dict)
    earlier: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parted: list[Parted] = field(default_factory=list)
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    holders: dict[str, int] = field(default_factory=dict)
    together: set[str] = field(default_factory=set)
    names: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    accumulated: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: str = ""

    def first(self, names: Iterable[str]) -> str:
        """The module of these parameters that a backward pass comes to first: which ran last."""
        modules = [one.rpartition(".")[0] for name in names for one in (name, *self.tied.get(name, ()))]
        return max(modules, key=self.place, default="")

    def place(self, module: str) -> int:
        """When a module ran, counted in the reference; one that is not seen to run, as the one around it."""
        while module and module not in self.order:
            module = module.rpartition(".")[0]
        return self.order.get(module, -1)


def pair(
    name: str,
    reference: torch.Tensor,
    ours: torch.Tensor,
    covered: torch.Tensor,
    floor: float,
    tolerance: float,
    apart: list[tuple[Part, dict[int, torch.Tensor]]],
    noise: float = 0.0,
) -> Pair:
    """Compares what is covered of two tensors.

    Args:
        floor: the root mean square of the layer's: a gradient that is zero but for rounding is judged by it.
        tolerance: of rounding, relative. noise: a norm up to which any difference is rounding.
    """
    a, b = reference[covered].double(), ours[covered].double()
    square, size = float(a @ a), a.numel()
    factor = float(a @ b) / square if square > 0 else float("nan")
    own = float(b.norm())
    rest = float((b - factor * a).norm()) / own if own > 0 and square > 0 else 0.0 if own == 0 else 1.0
    allowed = max(tolerance * max(square**0.5, floor * size**0.5), noise)
    difference = float((b - a).norm())
    off = difference / allowed if allowed > 0 else (0.0 if difference == 0 else float("inf"))
    if not torch.isfinite(b).all():
        factor, rest, off = float("nan"), float("nan"), float("inf")
    return Pair(name, reference, ours, covered, factor, rest, off, apart)


def layer_of(name: str) -> str:
    """The layer that a parameter is judged by: its name up to the last number in it, or its first part."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else parts[0]


def floors(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest root mean square of each layer's parameters, of the whole model's where a layer has one parameter."""
    sizes = {name: float(t.double().norm()) / max(t.numel(), 1) ** 0.5 for name, t in tensors.items()}
    layers: dict[str, list[float]] = {}
    for name, size in sizes.items():
        layers.setdefault(layer_of(name), []).append(size)
    most = max(sizes.values(), default=0.0)
    return {name: max(layers[layer_of(name)]) if len(layers[layer_of(name)]) > 1 else most for name in tensors}
