"""Derives what cut layers of torch's ``parallelize_module`` send from the layouts of DTensors."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pardemo.script.step.shapes import (
    GATHERED,
    GRADIENTS,
    LOSS,
    REGATHERED,
    REPLICATED,
    SUMMED,
    Passage,
    Ranks,
    Reader,
    Shapes,
    Term,
    ranks_of,
    sent_by,
)

WHOLE, SHARD, SUM, UNKNOWN = "whole", "shard", "sum", "unknown"


@dataclass
class Input:
    """One input of a module: how it comes, as which DTensor it goes on, and whether its gradient is a sum."""

    ranks: Ranks
    comes: str
    goes: str
    ratio: int
    itemsize: int
    summed: bool = False


class DTensors(Reader):
    """Reads layouts: of what a module is called with, of what reaches its forward, of what that returns, and of what
    the module returns in the end. Only meshes of one dimension are read; the others stay without a formula."""

    def __init__(self, shapes: Shapes):
        super().__init__(shapes)
        #: of modules that take or return DTensors their inputs, by position
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, Input]] = weakref.WeakKeyDictionary()
        self._taken: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def begins(self, passage: Passage, args: tuple[Any, ...]) -> None:
        known = self._known.get(passage.module)
        if known is None:
            return
        passage.begun = tuple((_layout(a), a.numel()) if isinstance(a, torch.Tensor) else None for a in args)
        passage.hook = passage.module.register_forward_hook(lambda module, args, output: self._left(passage, output))
        for position, taken in known.items():
            if position < len(args) and isinstance(args[position], torch.Tensor):
                self._input(passage, taken, args[position])

    def _input(self, passage: Passage, taken: Input, raw: torch.Tensor) -> None:
        """Adds what has to travel before, and after, a module's input is used: known since it was called before."""
        if taken.goes != WHOLE:
            return
        again = next((first for ref, first in self._taken if ref() is raw), "")
        if not again and (taken.comes == SHARD or taken.summed):
            self._taken.append((weakref.ref(raw), self._shapes.name(passage.module)))

        def add(kind: str, phase: str, carried: str) -> None:
            term = Term("TP", taken.ranks, kind, phase, raw.numel() * taken.ratio, carried)
            self._shapes.add(passage, term, taken.itemsize, again=again)

        if taken.comes == SHARD:
            add("all-gather", "forward", GATHERED)
        if taken.summed and raw.requires_grad and taken.comes == SHARD:
            add("reduce-scatter", "backward", GRADIENTS)
        elif taken.summed and raw.requires_grad and not isinstance(raw, DTensor):
            add("all-reduce", "backward", GRADIENTS)  # a DTensor stays a sum, and the module that made it sums it

    def ends(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        takes_dtensors = any(isinstance(a, DTensor) for a in args)
        if passage.module not in self._known:
            if takes_dtensors or isinstance(first, DTensor):
                self._known[passage.module] = {}
            return
        known = self._known[passage.module]
        for position, arg in enumerate(args):
            if isinstance(arg, DTensor) and position < len(passage.begun) and passage.begun[position] is not None:
                self._learn(passage, known, position, arg)
        if isinstance(first, DTensor) and (ranks := _ranks(first)):
            traits = first.numel(), first.element_size(), first.requires_grad, first.shape
            passage.ended = ranks, _layout(first), *traits
        if not list(self._shapes.outer()):
            self._taken = []

    def _learn(self, passage: Passage, known: dict[int, Input], position: int, arg: DTensor) -> None:
        ranks = _ranks(arg)
        if not ranks:
            return
        layout, numel = passage.begun[position]
        ratio = max(arg.numel() // max(numel, 1), 1)
        comes = layout if layout != WHOLE or ratio == 1 else SHARD if ratio == len(ranks) else UNKNOWN
        taken = Input(ranks, comes, _layout(arg), ratio, arg.element_size(), _column(passage.module))
        before = known.get(position)
        if before is not None and before.summed:
            taken.summed = True
        known[position] = taken
        if taken.summed and isinstance(arg, DTensor) and layout == WHOLE and ratio == 1:
            self._around(ranks)
        if taken.goes == SHARD and arg.requires_grad and passage.backward:
            self._replicated(passage, ranks)

    def _around(self, ranks: Ranks) -> None:
        """A column-cut layer takes what is whole: the gradient of a module's around it is a sum, if it made it so."""
        for outer in self._shapes.outer():
            for taken in self._known.get(outer.module, {}).values():
                if taken.ranks == ranks and taken.goes == WHOLE:
                    taken.summed = True
                    return

    def _replicated(self, passage: Passage, ranks: Ranks) -> None:
        """Parameters that all ranks have, of a module whose input is cut: their gradients are sums over the ranks."""
        parameters = [p for p in passage.module.parameters(recurse=False) if isinstance(p, DTensor) and p.requires_grad]
        if not passage.counts or not parameters or any(_layout(p) != WHOLE or _ranks(p) != ranks for p in parameters):
            return
        for number, parameter in enumerate(parameters):
            label = f"{self._shapes.name(passage.module)} {number}"
            term = Term("TP", ranks, "all-reduce", "", parameter.numel(), REPLICATED, parameter=label)
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

        def add(kind: str, phase: str, carried: str) -> None:
            self._shapes.add(passage, Term("TP", ranks, kind, phase, elements, carried, shape[-1]), itemsize)

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
            width = shape[-1]
            term = Term("TP", ranks, "all-reduce", "", elements // width, LOSS, width, loss=True)
            self._shapes.add(passage, term, itemsize, times=3)


def _column(module: torch.nn.Module) -> bool:
    """Whether it is a linear layer whose output's features are cut: the gradient of its input is a sum over ranks."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, torch.nn.Linear) or not isinstance(weight, DTensor):
        return False
    return any(p.is_shard(0) for p in weight.placements)


def _layout(tensor: torch.Tensor) -> str:
    """Says how a DTensor over one dimension lies: whole, a shard, or a partial sum. Any other tensor is whole."""
    if not isinstance(tensor, DTensor):
        return WHOLE
    (placement,) = tensor.placements if len(tensor.placements) == 1 else (None,)
    if placement is None:
        return UNKNOWN
    return WHOLE if placement.is_replicate() else SHARD if placement.is_shard() else SUM


def _ranks(tensor: DTensor) -> Ranks:
    """Returns the ranks of a mesh of one dimension; none of others."""
    return ranks_of(tensor.device_mesh.get_group()) if tensor.device_mesh.ndim == 1 else ()
