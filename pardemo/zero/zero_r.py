"""ZeRO-R: what is left in memory when model states are sharded: activations, buffers, fragments.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), 4.2 and 6.

- :func:`partitioned_checkpoint` (P_a): a checkpoint is kept in parts, one on each tensor-parallel rank, gathered when
  its block is recomputed; or on the host (P_a+cpu)::

    forward     x [b, s, h] on all t ranks -> each keeps [b·s·h/t]
    backward    all-gather: [b·s·h/t] of each -> x [b, s, h] on all, and the block is computed again

- :func:`reduce_in_buffer` (C_B): gradients travel through a buffer of constant size, however large the model is.
- :class:`Arena` (M_D): a memory in which holes come to be, small enough to follow by hand; torch's own allocator is in
  :mod:`pardemo.planner.fragments`.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from pardemo.collectives import ring_all_reduce
from pardemo.groups import group_of
from pardemo.tensor_parallel import exchange


@dataclass
class HostStore:
    """Where checkpoints wait on the host; counts the bytes that move there and back."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    held_bytes: int = 0
    _tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    _next: int = 0

    def put(self, tensor: torch.Tensor, owner: object) -> int:
        """Copies ``tensor`` to host memory (pinned where there is a GPU) and returns the number it goes by.

        The host lets go of it when it is taken back, or when ``owner`` is gone and nobody can take it any more.
        """
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        host.copy_(tensor)
        self._next += 1
        self._tensors[self._next] = host
        self.to_host_bytes += host.nbytes
        self.held_bytes += host.nbytes
        weakref.finalize(owner, self._drop, self._next).atexit = False
        return self._next

    def take(self, number: int, device: torch.device) -> torch.Tensor:
        """The tensor back on ``device``; the host lets go of it.

        Raises:
            RuntimeError: it was taken before, by a backward pass with ``retain_graph``.
        """
        host = self._drop(number)
        if host is None:
            raise RuntimeError(
                "a second backward pass through a checkpoint on the host, which the first one has taken back: leave "
                "out retain_graph=True, or store="
            )
        self.to_device_bytes += host.nbytes
        return host.to(device, copy=True)

    def _drop(self, number: int) -> torch.Tensor | None:
        host = self._tensors.pop(number, None)
        self.held_bytes -= host.nbytes if host is not None else 0
        return host


class _Kept:
    """Lives as long as the graph that a checkpoint belongs to."""


class _PartitionedCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, group, store, x):
        ctx.function, ctx.group, ctx.store, ctx.shape = function, group, store, x.shape
        part = exchange.share(x.numel(), group, "a checkpoint")
        rank = dist.get_rank(group)
        mine = x.detach().reshape(-1)[rank * part : (rank + 1) * part].clone()
        ctx.device = x.device
        ctx.random = torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None
        kind = x.device.type
        ctx.precision = {"device_type": kind, "enabled": torch.is_autocast_enabled(kind),
                         "dtype": torch.get_autocast_dtype(kind)}  # fmt: skip
        if store is None:
            ctx.save_for_backward(mine)
        else:
            ctx.kept = _Kept()
            ctx.number = store.put(mine, ctx.kept)
        with torch.no_grad():
            return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        mine = ctx.saved_tensors[0] if ctx.store is None else ctx.store.take(ctx.number, ctx.device)
        x = exchange.all_gather(mine, ctx.group, 0).view(ctx.shape).requires_grad_()
        on_cpu, on_gpu = ctx.random  # the same dropout masks as forward, and the same precision
        with torch.enable_grad(), torch.random.fork_rng(devices=[] if on_gpu is None else [ctx.device]):
            torch.set_rng_state(on_cpu)
            if on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu, ctx.device)
            with torch.autocast(**ctx.precision):
                y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, None, None, x.grad


def partitioned_checkpoint(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    store: HostStore | None = None,
) -> torch.Tensor:
    """``function(x)``, of which 1/N of ``x`` is kept on each rank of the tensor-parallel ``group`` (P_a, 6.1).

    Every rank has the whole ``x``: that is the redundancy. Backward, the parts are gathered, one all-gather of x, and
    the function is run again.

    Args:
        function: a block of parallel layers; one tensor in, one out.
        x: [batch, sequence, hidden], the same on every rank, with a gradient.
        group: the tensor-parallel ranks; the default group when None.
        store: keep the part on the host (P_a+cpu).

    Raises:
        ValueError: ``x`` does not divide by the ranks, or needs no gradient (then nothing would be recomputed).
    """
    if not torch.is_grad_enabled():
        return function(x)
    if not x.requires_grad:
        raise ValueError("a checkpoint's input has to require a gradient: without one its parameters get none")
    return _PartitionedCheckpoint.apply(function, group_of(group), store, x)


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
    buffer, packed, used = pieces[0].new_empty(room), [], 0
    for piece in pieces:
        at = 0
        while at < piece.numel():
            take = min(room - used, piece.numel() - at)
            buffer[used : used + take] = piece[at : at + take]
            packed.append((piece[at : at + take], used))
            at, used = at + take, used + take
            if used == room:
                _exchange(buffer, packed, used, group)
                packed, used = [], 0
    if used:
        _exchange(buffer, packed, used, group)
    return buffer.nbytes


def _exchange(buffer: torch.Tensor, packed: list, used: int, group: dist.ProcessGroup | None) -> None:
    ring_all_reduce(buffer[:used], group)
    for piece, at in packed:
        piece.copy_(buffer[at : at + piece.numel()])


class OutOfMemory(MemoryError):
    """No free block is large enough. ``free`` is what all of them hold together, ``largest`` the largest one's size."""

    def __init__(self, wanted: int, free: int, largest: int):
        super().__init__(f"{wanted} wanted; {free} are free, but no block of more than {largest}")
        self.wanted, self.free, self.largest = wanted, free, largest


class Arena:
    """Memory of ``size`` units, given out first-fit in the order of addresses.

    >>> arena = Arena(10)
    >>> a, b = arena.take(4), arena.take(4)
    >>> arena.give_back(a)
    >>> arena.free, arena.largest
    (6, 4)
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"memory has a size of at least 1, not {size}")
        self.size = size
        self.taken: dict[int, int] = {}  # address -> size

    @property
    def free(self) -> int:
        return self.size - sum(self.taken.values())

    @property
    def largest(self) -> int:
        """The largest free block."""
        return max((end - begin for begin, end in self._gaps()), default=0)

    def take(self, size: int) -> int:
        """The address of a new block.

        Raises:
            OutOfMemory: no free block is large enough. ValueError: a size below 1.
        """
        if size < 1:
            raise ValueError(f"a block has a size of at least 1, not {size}")
        for begin, end in self._gaps():
            if end - begin >= size:
                self.taken[begin] = size
                return begin
        raise OutOfMemory(size, self.free, self.largest)

    def give_back(self, address: int) -> None:
        """Frees the block at ``address``; KeyError when there is none."""
        del self.taken[address]

    def _gaps(self) -> list[tuple[int, int]]:
        gaps, at = [], 0
        for begin, size in sorted(self.taken.items()):
            if begin > at:
                gaps.append((at, begin))
            at = begin + size
        if at < self.size:
            gaps.append((at, self.size))
        return gaps
