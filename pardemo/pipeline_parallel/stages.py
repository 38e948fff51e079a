"""Cutting a list of layers into stages, and a batch into micro-batches."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


def cut_by_layers(layers: Sequence[nn.Module], stages: int) -> list[nn.Sequential]:
    """Stages of equally many layers; where they do not divide, the first ones have one more.

    Raises:
        ValueError: fewer layers than stages, or no stage.
    """
    _check(layers, stages)
    most, more = divmod(len(layers), stages)
    return _build(layers, [most + (stage < more) for stage in range(stages)])


def cut_by_parameters(layers: Sequence[nn.Module], stages: int) -> list[nn.Sequential]:
    """Stages whose largest has as few parameters as any cut of the list allows.

    Raises:
        ValueError: fewer layers than stages, or no stage.
    """
    _check(layers, stages)
    return _build(layers, balance([sum(p.numel() for p in layer.parameters()) for layer in layers], stages))


class _Changeable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def changeable(x: torch.Tensor) -> torch.Tensor:
    """A stage's input in the same memory, which the stage may change in place (``ReLU(inplace=True)``) as it might
    change what another layer computed; autograd forbids it for a leaf."""
    return _Changeable.apply(x) if x.is_leaf and x.requires_grad and torch.is_grad_enabled() else x


def cut_batch(what: str, batch: Tensors | None, micro_batches: int) -> list[Tensors]:
    """A batch's micro-batches; ``what`` it is, "inputs" or "targets", is for the errors.

    Raises:
        ValueError: none is given, or it does not divide.
        TypeError: it is neither a tensor nor a tuple of them.
    """
    if batch is None:
        raise ValueError(f"the {'first' if what == 'inputs' else 'last'} stage's rank needs the {what} of the batch")
    if isinstance(batch, tuple):
        return list(zip(*(cut_batch(what, one, micro_batches) for one in batch), strict=True))
    if not isinstance(batch, torch.Tensor):
        raise TypeError(f"the {what} are a tensor or a tuple of tensors, not {type(batch).__name__}")
    if len(batch) % micro_batches or not len(batch):
        raise ValueError(f"a batch of {len(batch)} does not divide into {micro_batches} micro-batches of equal size")
    # .data: a counter of changes of its own, so that a stage that changes one in place does not spoil the others
    return [part if part.requires_grad else part.data for part in batch.chunk(micro_batches)]


def balance(sizes: Sequence[int], parts: int) -> list[int]:
    """How many of ``sizes`` go into each part, in their order, none empty, so that the largest sum is smallest."""
    until = [0, *accumulate(sizes)]
    # best[n] = (largest sum, the parts' lengths) of the first n sizes cut into as many parts as the rounds so far
    best = {n: (until[n], [n]) for n in range(1, len(sizes) + 1)}
    for part in range(1, parts):
        best = {
            n: min((max(best[k][0], until[n] - until[k]), [*best[k][1], n - k]) for k in range(part, n))
            for n in range(part + 1, len(sizes) + 1)
        }
    return best[len(sizes)][1]


def _check(layers: Sequence[nn.Module], stages: int) -> None:
    if stages < 1:
        raise ValueError(f"a model is cut into at least 1 stage, not {stages}")
    if len(layers) < stages:
        raise ValueError(f"{len(layers)} layers cannot be cut into {stages} stages: a stage needs a layer at least")


def _build(layers: Sequence[nn.Module], lengths: Sequence[int]) -> list[nn.Sequential]:
    ends = list(accumulate(lengths))
    return [nn.Sequential(*layers[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
