"""Links and a communication thread of one engine's own, so that engines of a group do not disturb each other."""

import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist

from pardemo import compat
from pardemo.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pardemo.collectives.communication_thread import CommunicationThread, communication_thread_of
from pardemo.collectives.links import Link
from pardemo.collectives.ring import agree

#: How many channels a group has had. Not how many live: ranks collect what was dropped at different times.
_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count]" = weakref.WeakKeyDictionary()


class Channel:
    """Links and a communication thread for one engine, so that two engines of a group never meet on the wire.

    Whatever the engines' order on each rank, what one sends is received by itself. Collective: all ranks of ``group``
    make their channels in the same order. Dropped or closed, it leaves neither a socket nor a thread behind.

    Without links of its own (CUDA tensors, a function of the caller's that sends otherwise) it takes the group's
    links and its shared communication thread: the order of the program is the order of sending, and ranks whose orders
    differ are told so before data moves.

    Args:
        name: the engine's, for messages; the channel's number in its group is added.
        links: whether to make links of its own: the tensors are the CPU's. No matter in a group of one.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, *, links: bool = True):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.name = f"{name} {next(_numbers.setdefault(group, itertools.count()))}"
        self._link: Link | None = None
        self._thread = communication_thread_of(group)
        if links and self.size > 1:
            with compat.without_modes():  # meters: the caller did not ask for these messages
                self._link = Link(group, self.name)
            self._thread = CommunicationThread(self.name)

    def submit(self, function: Callable, *args: object) -> Future:
        """Runs ``function(*args)`` in the communication thread, after what was submitted before.

        The exchanges below are for functions that run there, or for the caller's own thread while none does.
        """
        return self._thread.submit(function, *args)

    def all_reduce(self, tensor: torch.Tensor, label: str, op: str = "sum") -> torch.Tensor:
        """:func:`~pardemo.collectives.ring_all_reduce`, in place. ``label``: the same words on every rank."""
        return ring_all_reduce(tensor, self.group, op, label=self._ours(label), link=self._link)

    def reduce_scatter(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        """:func:`~pardemo.collectives.ring_reduce_scatter`: this rank's chunk of the sum."""
        return ring_reduce_scatter(flat, self.group, label=self._ours(label), link=self._link)

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, label: str) -> torch.Tensor:
        """:func:`~pardemo.collectives.ring_all_gather` of the ranks' shards into ``out``."""
        return ring_all_gather(shard, self.group, out, label=self._ours(label), link=self._link)

    def compare(self, tensor: torch.Tensor, label: str) -> None:
        """ValueError where the ranks are not at the same exchange of the same tensor: for one by another's function."""
        agree(tensor, f"exchange of {self._ours(label)}", self.group)

    def close(self) -> None:
        """Waits for what was submitted, then closes the links of its own and ends their thread."""
        if self._link is not None:
            self._thread.shutdown()
            self._link.close()

    def _ours(self, label: str) -> str:
        return f"{label} of {self.name}"
