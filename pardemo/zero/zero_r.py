"""ZeRO-R: what is left in memory when model states are sharded: activations and buffers.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), 4.2 and 6.

- :func:`partitioned_checkpoint` (P_a): a checkpoint is kept in parts, one on each tensor-parallel rank, gathered when
  its block is recomputed; or on the host (P_a+cpu)::

    forward     x [b, s, h] on all t ranks -> each keeps [b·s·h/t]
    backward    all-gather: [b·s·h/t] of each -> x [b, s, h] on all, and the block is computed again

- :func:`reduce_in_buffer` (C_B): gradients travel through a buffer of constant size, however large the model is.
"""

import weakref
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from pardemo.collectives import ring_all_reduce
from pardemo.groups import group_of
from pardemo.tensor_parallel import exchange


class HostStore:
    """Keeps checkpoints on the host; counts the bytes that move there and back.

    Attributes: ``to_host_bytes``, ``to_device_bytes``, and ``held_bytes``, until nobody can take them back any more.
    """

    def __init__(self) -> None:
        self.to_host_bytes = self.to_device_bytes = self.held_bytes = 0

    def put(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copies ``tensor`` to host memory (pinned where there is a GPU); what it returns brings it back."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        host.copy_(tensor)
        device, nbytes = tensor.device, host.nbytes
        self.to_host_bytes += nbytes
        self.held_bytes += nbytes

        def take() -> torch.Tensor:
            self.to_device_bytes += nbytes
            return host.to(device, copy=True)

        def drop() -> None:
            self.held_bytes -= nbytes

        weakref.finalize(take, drop).atexit = False
        return take


def partitioned_checkpoint(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    store: HostStore | None = None,
) -> torch.Tensor:
    """``function(x)``, of which 1/N of ``x`` is kept on each rank of the tensor-parallel ``group`` (P_a, 6.1).

    Every rank has the whole ``x``: that is the redundancy. Backward, the parts are gathered, one all-gather of x, and
    the function is run again, to its end, with the same random numbers and in the same precision: torch's
    ``checkpoint``, with hooks on what it saves.

    Args:
        function: a block of parallel layers.
        x: [batch, sequence, hidden], the same on every rank.
        group: the tensor-parallel ranks; the default group when None.
        store: keep the part on the host (P_a+cpu).

    Raises:
        ValueError: ``x`` does not divide by the ranks.
    """
    if not torch.is_grad_enabled():
        return function(x)
    group = group_of(group)
    part, rank = exchange.divide(x.numel(), group, "a checkpoint"), dist.get_rank(group)

    def keep(saved: torch.Tensor) -> Callable[[], torch.Tensor]:
        mine = saved.detach().reshape(-1)[rank * part :][:part].clone()
        return (lambda: mine) if store is None else store.put(mine)

    def gather(take: Callable[[], torch.Tensor]) -> torch.Tensor:
        return exchange.all_gather(take(), group, 0).view(x_shape)

    x_shape = x.shape
    with torch.autograd.graph.saved_tensors_hooks(keep, gather):
        return checkpoint(function, x, use_reentrant=False, early_stop=False)


def reduce_in_buffer(
    tensors: Iterable[torch.Tensor], buffer_bytes: int | None, group: dist.ProcessGroup | None = None
) -> int:
    """Sums each tensor over the ranks, in place, packed into one buffer; returns the buffer's bytes (C_B, 6.2).

    With ``buffer_bytes`` the buffer has that size and is used again and again; with None it holds all tensors at once
    and grows with the model.

    Raises:
        ValueError: ``buffer_bytes`` too small for one element, or tensors of several dtypes.
    """
    tensors = list(tensors)
    if not tensors:
        return 0
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError("tensors that share a buffer need one dtype")
    pieces = [t.view(-1) for t in tensors]
    room = sum(p.numel() for p in pieces)
    if buffer_bytes is not None:
        room = min(room, buffer_bytes // tensors[0].element_size())
    if room < 1:
        raise ValueError(f"a buffer of {buffer_bytes} bytes does not hold one element")
    buffer, ends = pieces[0].new_empty(room), [0, *accumulate(p.numel() for p in pieces)]
    for first in range(0, ends[-1], room):  # of all elements in a row, those that the buffer has at a time
        packed = []
        for piece, begin in zip(pieces, ends, strict=False):
            part = piece[max(0, first - begin) : max(0, first + room - begin)]
            if part.numel():
                packed.append((part, buffer[max(0, begin - first) :][: part.numel()]))
        for part, copied in packed:
            copied.copy_(part)
        ring_all_reduce(buffer[: min(room, ends[-1] - first)], group)
        for part, copied in packed:
            part.copy_(copied)
    return buffer.nbytes
