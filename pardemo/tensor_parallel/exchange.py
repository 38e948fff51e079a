"""Sends what the layers exchange: four collectives in a group, at once or while something else is computed.

CPU tensors go round pardemo's own ring, CUDA tensors through the backend (nccl), called here directly: the functions
of :mod:`pardemo.collectives` first compare the ranks' calls, for which the host would wait for the GPU in each layer.
Nothing here knows autograd, and only :func:`all_reduce_in_place` changes a tensor that it was given.

What two ranks have before and after, each letter a part of a tensor::

    all_reduce        rank 0  A B          A+C B+D          2(N−1)/N of the tensor sent by each rank
                      rank 1  C D   ->     A+C B+D

    reduce_scatter    rank 0  A B          A+C              (N−1)/N
                      rank 1  C D   ->     B+D

    all_gather        rank 0  A            A B              (N−1)/N of the result
                      rank 1  B     ->     A B

    split             rank 0  A B          A                nothing
                      rank 1  A B   ->     B
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pardemo.collectives.communication_thread import communication_thread_of
from pardemo.collectives.decorators import not_compiled
from pardemo.collectives.links import materialized
from pardemo.groups import divide

#: On CPU ranks smaller exchanges are done at once: waking the communication thread takes longer than sending them.
LEAST_THREADED_BYTES = 1 << 20


@not_compiled
def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: str = "sum") -> torch.Tensor:
    """The sum (or largest) over the ranks, as a new contiguous tensor."""
    values = materialized(tensor)
    new = values if values.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() else values.clone()
    return all_reduce_in_place(new, group, op)


@not_compiled
def all_reduce_in_place(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: str = "sum", label: str = ""
) -> torch.Tensor:
    """The same in the tensor itself: for one that the caller has just made and nobody else knows."""
    if tensor.is_cuda:
        values = materialized(tensor)
        dist.all_reduce(values, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group)
        return tensor if values.data_ptr() == tensor.data_ptr() else tensor.copy_(values)
    return ring_all_reduce(tensor, group, op, label=label)


@not_compiled
def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The ranks' tensors side by side along ``dim``: [b, s/t, h] of each to [b, s, h], with dim 1."""
    size, shard = group.size(), materialized(tensor)
    if tensor.is_cuda:
        flat = shard.new_empty(size * shard.numel())
        dist.all_gather_single(flat, shard.view(-1), group=group)
    else:
        flat = ring_all_gather(shard, group)
    return flat.view(size, *shard.shape).movedim(0, dim).flatten(dim, dim + 1)  # [t, b, s/t, h] to [b, s, h]


@not_compiled
def reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part, along ``dim``, of the sum over the ranks: [b, s, h] to [b, s/t, h], with dim 1."""
    parts = materialized(tensor.detach().unflatten(dim, (group.size(), -1)).movedim(dim, 0))  # [t, b, s/t, h]
    if tensor.is_cuda:
        part = torch.empty_like(parts[0])
        dist.reduce_scatter_single(part, parts.flatten(0, 1), group=group)
        return part
    return ring_reduce_scatter(parts, group).view(parts.shape[1:])


def split(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part along ``dim``, copied, so that the whole need not stay alive. Sends nothing."""
    part = divide(tensor.shape[dim], group, f"dimension {dim}")
    return tensor.detach().narrow(dim, dist.get_rank(group) * part, part).contiguous()


@not_compiled
def start(
    collective: Callable, tensor: torch.Tensor, group: dist.ProcessGroup, *args: object
) -> Callable[[], torch.Tensor]:
    """Begins ``collective(tensor, group, *args)`` and returns a function that waits for its result.

    On CPU ranks a thread runs it if the tensor is large enough; on CUDA a side stream does. Until the result is there
    no other collective of the same group may be called.
    """
    if tensor.is_cuda:
        return _start_in_stream(collective, tensor, group, *args)
    if tensor.numel() * tensor.element_size() < LEAST_THREADED_BYTES:
        result = collective(tensor, group, *args)
        return lambda: result
    return communication_thread_of(group).submit(collective, tensor, group, *args).result


def _start_in_stream(collective: Callable, tensor: torch.Tensor, *args: object) -> Callable[[], torch.Tensor]:
    main, side = torch.cuda.current_stream(), _side_stream(tensor.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result = collective(tensor, *args)
    tensor.record_stream(side)

    def wait() -> torch.Tensor:
        main.wait_stream(side)
        result.record_stream(main)
        return result

    return wait


@functools.cache
def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)
