"""What modules that torch's ``parallelize_module`` has cut need of the other ranks: from layouts before and after."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pardemo.measure.shapes import Passage, Ranks, Shapes, Term, ranks_of, sent_by

WHOLE, SHARD, SUM, UNKNOWN = "whole", "shard", "sum", "unknown"
GATHERED = "inputs of column-cut layers, gathered"
SUMMED = "outputs of row-cut layers, summed"
GRADIENTS = "gradients of column-cut layers' inputs, summed"
REGATHERED = "gradients of row-cut layers' outputs, gathered"
REPLICATED = "gradients of parameters that each rank has and whose inputs are cut"
LOSS = "a loss on the cut vocabulary: maximum, sum and target's logit of each token"


@dataclass
class Input:
    """One input of a module: how it comes, as which DTensor it goes on, and whether its gradient is a sum."""

    ranks: Ranks
    comes: str
    goes: str
    ratio: int
    itemsize: int
    summed: bool = False


@dataclass
class Layouts:
    """What is known of a module that takes or returns DTensors: its inputs, by position."""

    inputs: dict[int, Input] = field(default_factory=dict)


class DTensors:
    """Reads layouts: of what a module is called with, of what reaches its forward, of what that returns, and of what
    the module returns in the end. Only meshes of one dimension are read; the others stay without a formula."""

    def __init__(self, shapes: Shapes):
        self._shapes = shapes
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, Layouts] = weakref.WeakKeyDictionary()
        self._taken: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def begins(self, passage: Passage, args: tuple[Any, ...]) -> None:
        """A module is called; nothing of its hooks has run yet."""
        known = self._known.get(passage.module)
        if known is None:
            return
        passage.begun = tuple((_layout(a), a.numel()) if isinstance(a, torch.Tensor) else None for a in args)
        passage.hook = passage.module.register_forward_hook(lambda module, args, output: self._left(passage, output))
        for position, one in known.inputs.items():
            if position < len(args) and isinstance(args[position], torch.Tensor):
                self._input(passage, one, args[position])

    def _input(self, passage: Passage, one: Input, raw: torch.Tensor) -> None:
        """What has to travel before, and after, a module's input is used: known since it was called before."""
        if one.goes != WHOLE:
            return
        elements, name = raw.numel() * one.ratio, self._shapes.name(passage.module)
        again = next((first for ref, first in self._taken if ref() is raw), "")
        if not again and (one.comes == SHARD or one.summed):
            self._taken.append((weakref.ref(raw), name))
        told: dict[str, Any] = {"passage": passage, "again": again, "module": name}
        if one.comes == SHARD:
            self._shapes.add("TP", one.ranks, "all-gather", "forward", elements, one.itemsize, GATHERED, **told)
        if one.summed and raw.requires_grad:
            if one.comes == SHARD:
                kind = "reduce-scatter"
            elif not isinstance(raw, DTensor):
                kind = "all-reduce"
            else:  # it stays a sum, and the module that made it a DTensor sums it
                return
            self._shapes.add("TP", one.ranks, kind, "backward", elements, one.itemsize, GRADIENTS, **told)

    def ends(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        """A module's forward has returned; its own hooks have not run yet. ``args`` are those that reached it."""
        first = output[0] if isinstance(output, tuple) and output else output
        some = any(isinstance(a, DTensor) for a in args)
        if passage.module not in self._known:
            if some or isinstance(first, DTensor):
                self._known[passage.module] = Layouts()
            return
        known = self._known[passage.module]
        for position, arg in enumerate(args):
            if isinstance(arg, DTensor) and position < len(passage.begun) and passage.begun[position] is not None:
                self._learn(passage, known, position, arg)
        if isinstance(first, DTensor) and (ranks := _ranks(first)):
            passage.ended = (
                ranks,
                _layout(first),
                first.numel(),
                first.element_size(),
                first.requires_grad,
                first.shape,
            )
        if not list(self._shapes.outer()):
            self._taken = []

    def _learn(self, passage: Passage, known: Layouts, position: int, arg: DTensor) -> None:
        ranks = _ranks(arg)
        if not ranks:
            return
        layout, numel = passage.begun[position]
        ratio = max(arg.numel() // max(numel, 1), 1)
        comes = layout if layout != WHOLE or ratio == 1 else SHARD if ratio == len(ranks) else UNKNOWN
        one = Input(ranks, comes, _layout(arg), ratio, arg.element_size(), _column(passage.module))
        before = known.inputs.get(position)
        if before is not None and before.summed:
            one.summed = True
        known.inputs[position] = one
        if one.summed and isinstance(arg, DTensor) and layout == WHOLE and ratio == 1:
            self._around(ranks)
        if one.goes == SHARD and arg.requires_grad and passage.backward:
            self._replicated(passage, ranks)

    def _around(self, ranks: Ranks) -> None:
        """A column-cut layer takes what is whole: the gradient of a module's around it is a sum, if it made it so."""
        for outer in self._shapes.outer():
            layouts = self._known.get(outer.module)
            for one in layouts.inputs.values() if layouts else ():
                if one.ranks == ranks and one.goes == WHOLE:
                    one.summed = True
                    return

    def _replicated(self, passage: Passage, ranks: Ranks) -> None:
        """Parameters that all ranks have, of a module whose input is cut: their gradients are sums over the ranks."""
        own = [p for p in passage.module.parameters(recurse=False) if isinstance(p, DTensor) and p.requires_grad]
        if not passage.counts or not own or any(_layout(p) != WHOLE or _ranks(p) != ranks for p in own):
            return
        for number, parameter in enumerate(own):
            of = f"{self._shapes.name(passage.module)} {number}"
            term = Term("TP", ranks, "all-reduce", "", False, parameter.numel(), REPLICATED, of=of)
            self._shapes.once(term, sent_by("all-reduce", parameter.numel() * parameter.element_size(), len(ranks)))

    def _left(self, passage: Passage, output: Any) -> None:
        """A module's last hook: what its output has become."""
        passage.hook.remove()
        first = output[0] if isinstance(output, tuple) and output else output
        if passage.ended is None or not isinstance(first, torch.Tensor):
            return
        ranks, layout, elements, itemsize, grad, shape = passage.ended
        if isinstance(first, DTensor):
            became = _layout(first)
        else:
            became = WHOLE if first.numel() == elements else SHARD if first.numel() * len(ranks) == elements else ""
        module = self._shapes.name(passage.module)
        told: dict[str, Any] = {"passage": passage}

        def add(kind: str, phase: str, what: str) -> None:
            self._shapes.add(
                "TP", ranks, kind, phase, elements, itemsize, what, module=module, width=shape[-1], **told
            )  # fmt: skip

        if layout == SUM and became == WHOLE:
            add("all-reduce", "forward", SUMMED)
        elif layout == SUM and became == SHARD:
            add("reduce-scatter", "forward", SUMMED)
            if grad:
                add("all-gather", "backward", REGATHERED)
        elif layout == SHARD and became == WHOLE:
            add("all-gather", "forward", f"outputs of {module}, gathered whole")
        elif layout == WHOLE and became == SHARD and grad:
            add("all-gather", "backward", f"gradients of outputs of {module}, gathered")
        elif layout == SHARD and isinstance(first, DTensor) and _column(passage.module):
            self._shapes.add(
                "TP", ranks, "all-reduce", "", elements // shape[-1], itemsize, LOSS, times=3,
                width=shape[-1], loss=True, **told,
            )  # fmt: skip


def _column(module: torch.nn.Module) -> bool:
    """Whether it is a linear layer whose output's features are cut: the gradient of its input is a sum over ranks."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, torch.nn.Linear) or not isinstance(weight, DTensor):
        return False
    return any(p.is_shard(0) for p in weight.placements)


def _layout(tensor: torch.Tensor) -> str:
    """Of a DTensor over one dimension: whole, a shard, or a sum that is not summed yet. Any other tensor is whole."""
    if not isinstance(tensor, DTensor):
        return WHOLE
    (placement,) = tensor.placements if len(tensor.placements) == 1 else (None,)
    if placement is None:
        return UNKNOWN
    return WHOLE if placement.is_replicate() else SHARD if placement.is_shard() else SUM


def _ranks(tensor: DTensor) -> Ranks:
    """Of a mesh of one dimension; of others none."""
    return ranks_of(tensor.device_mesh.get_group()) if tensor.device_mesh.ndim == 1 else ()
