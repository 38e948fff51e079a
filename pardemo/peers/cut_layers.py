"""A tensor-parallel layer of each library, with the weights of a plain MLP or block, to compare with the plain one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pardemo.small_models import gpt


class CutLayer(NamedTuple):
    """This rank's part of a layer.

    Attributes:
        turn: brings activations [batch, sequence, hidden] into the library's layout, and back.
        weights_error: after a backward pass, the largest relative error of the weights' gradients (collective).
    """

    layer: nn.Module
    turn: Callable[[torch.Tensor], torch.Tensor]
    weights_error: Callable[[], float]


@contextlib.contextmanager
def cut_layer(library: str, plain: Any, **options: bool) -> Iterator[CutLayer]:
    """The layer of ``library``, cut over all ranks, with the weights of a plain one. Collective.

    Args:
        library: "pardemo", "Megatron-core" or "DTensor".
        plain: a :class:`~pardemo.small_models.gpt.MLP` or ``Block``, with the gradients of its backward pass.
        options: ``sequence_parallel``, of an MLP not for DTensor, of a block not for Megatron-core.
    """
    is_block, size = isinstance(plain, gpt.Block), dist.get_world_size()
    layer: Any
    if library == "DTensor":
        from pardemo.peers.pytorch import dtensor

        layer = (dtensor.block if is_block else dtensor.mlp)(plain, dtensor.mesh(size), **options)
        yield CutLayer(layer, _same, lambda: gpt.largest_error(dtensor.gradients(layer), gpt.gradients(plain)))
        return
    cut: Any = gpt.parallel_block if is_block else gpt.parallel_mlp
    truth = dict(cut(gpt.gradients_as_weights(plain)).named_parameters())
    if library == "pardemo":
        layer = cut(plain, **options)
        yield CutLayer(layer, _same, lambda: gpt.largest_error(gpt.gradients(layer), truth))
        return
    from pardemo.peers import megatron

    with megatron.megatron(tp=size):
        layer = (megatron.Block if is_block else megatron.MLP)(plain, **options)
        yield CutLayer(layer, _turned, lambda: gpt.largest_error(megatron.gradients(layer), truth))


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's part on this rank, in autograd's graph (``compat.local_part``: outside); else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _turned(x: torch.Tensor) -> torch.Tensor:
    """[batch, sequence, hidden] to [sequence, batch, hidden], and the other way round."""
    return x.transpose(0, 1).contiguous()
