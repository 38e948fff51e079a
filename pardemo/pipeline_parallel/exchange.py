"""Sends activations to the next stage, and their gradients back. Nothing here knows autograd.

Three ranks; with several chunks on each the ring closes, from the last rank to the first::

    rank 0 --[b, s, h]-->  rank 1 --[b, s, h]-->  rank 2        FORTH: a micro-batch's activations
    rank 0 <--[b, s, h]--  rank 1 <--[b, s, h]--  rank 2        BACK: the loss's gradients with respect to them

Under gloo messages of up to a MiB travel over links of the group's own (:mod:`pardemo.collectives.links`): handing
such a message to the kernel takes less time than telling another thread to do it, and that thread would take its turns
on a core from the computation. Nobody waits for one to leave before the step's end. Larger ones, and other backends',
go by ``isend`` and ``irecv``, which carry them while this rank computes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pardemo.collectives.links import Link, bytes_of, drop_link, link_of, materialized

#: Messages of the backend's that may be leaving at a time; before another, the oldest is waited for, so that its memory
#: can go: gloo does not say whether one has left.
LEAVING = 2
#: The largest message on a link of our own. On two cores a step took 1.06 (1 MiB) to 2.8 times (4 KiB) as long by gloo;
#: from 4 MiB on there was no difference, and between hosts the backend's thread has more to hide.
LINK_BYTES = 1 << 20
#: The two ways through the pipeline, as steps from rank to rank, and what travels on them; up the ranks in a V, on the
#: links of the same way, the activations go back and the gradients forth.
FORTH, BACK = 1, -1
USES = {FORTH: "activations", BACK: "gradients"}
#: What a tensor between stages can be made of; a dtype's place in here is what travels.
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MAX_DIMENSIONS = 8
COLUMNS = 3 + MAX_DIMENSIONS  # dtype, whether it has a gradient, dimensions, sizes


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a stage hands on: its shape and dtype, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class StageExchange:
    """Point-to-point messages of one rank within ``group``, which go on while it computes.

    Those of one way arrive in the order in which they were sent, and are to be received in it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._has_links = dist.get_backend(group) == "gloo" and self._size > 1  # the same on all ranks
        self._sending: deque[tuple[Callable, torch.Tensor]] = deque()
        self._on_links: deque[tuple[Link, int, torch.Tensor]] = deque()
        self._expected: dict[int, deque[Incoming]] = {FORTH: deque(), BACK: deque()}
        for way in USES if self._has_links else ():
            self._link(way)  # of all ranks together, and so not when one of them happens to need it

    def send(self, tensor: torch.Tensor, way: int) -> None:
        """Starts sending a tensor's values one step along ``way``, and keeps them until they have left."""
        tensor = materialized(tensor)
        if self._by_link(tensor):
            link = self._link(way)
            self._on_links.append((link, link.send(bytes_of(tensor)), tensor))
            while self._on_links and self._on_links[0][0].has_sent(self._on_links[0][1]):
                self._on_links.popleft()
        else:
            while len(self._sending) >= LEAVING:
                self._sending.popleft()[0]()
            work = dist.isend(tensor, group=self.group, group_dst=(self._rank + way) % self._size)
            self._sending.append((work.wait, tensor))  # type: ignore[union-attr]

    def receive(self, shape: Sequence[int], dtype: torch.dtype, way: int) -> "Incoming":
        """Starts receiving a tensor from the rank from which ``way`` leads here."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if self._by_link(tensor):
            return Incoming(tensor, self._link(way), self._expected[way])
        work = dist.irecv(tensor, group=self.group, group_src=(self._rank - way) % self._size)
        return Incoming(tensor, work)  # type: ignore[arg-type]

    def send_specs(self, specs: Sequence[TensorSpec], way: int) -> None:
        """Tells the next stage what is coming, ahead of a step's first micro-batch."""
        rows: list[list[int]] = [[DTYPES.index(s.dtype), int(s.has_gradient), len(s.shape), *s.shape] for s in specs]
        rows = [row + [0] * (COLUMNS - len(row)) for row in rows]
        for numbers in ([len(specs)], rows):  # [1], then [tensors, COLUMNS]
            self.send(torch.tensor(numbers, dtype=torch.int32, device=self.device), way)

    def receive_specs(self, way: int) -> tuple[TensorSpec, ...]:
        """Waits for what :meth:`send_specs` tells."""
        tensors = self.receive([1], torch.int32, way).wait().item()
        rows = self.receive([tensors, COLUMNS], torch.int32, way).wait().tolist()  # type: ignore[list-item]
        return tuple(TensorSpec(tuple(sizes[:n]), DTYPES[dtype], bool(grad)) for dtype, grad, n, *sizes in rows)

    def flush(self) -> None:
        """Waits until everything has left."""
        while self._sending:
            self._sending.popleft()[0]()
        while self._on_links:
            link, number, _ = self._on_links.popleft()
            link.wait_sent(number)

    def _by_link(self, tensor: torch.Tensor) -> bool:
        return self._has_links and tensor.device.type == "cpu" and tensor.nbytes <= LINK_BYTES

    def _link(self, way: int) -> Link:
        return link_of(self.group, USES[way], way, LINK_BYTES)


def abandon(group: dist.ProcessGroup) -> None:
    """Closes the links: who waits for this rank gets an error, and nothing on them is taken for another step's."""
    for use in USES.values():
        drop_link(group, use)


class Incoming:
    """A tensor on its way: on a link, where it lies behind what is expected before it, or as the backend's work."""

    def __init__(self, tensor: torch.Tensor, source: Link | dist.Work, expected: "deque[Incoming] | None" = None):
        self._tensor, self._source, self._expected = tensor, source, expected
        if expected is not None:
            expected.append(self)

    def wait(self) -> torch.Tensor:
        """The tensor, as soon as it is there."""
        if self._expected is None:
            self._source.wait()  # type: ignore[union-attr]
        while self._expected and self in self._expected:
            first = self._expected.popleft()
            first._source.receive(bytes_of(first._tensor))  # type: ignore[union-attr]
        return self._tensor
