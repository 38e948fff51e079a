"""Gradients on their way: what a data-parallel wrapper hands to its channel while it computes on.

The thread that computes and the thread that sends, on each rank::

    computes   backward: bucket 1 full | bucket 2 full | bucket 3 full | wait() ... | hand out, step
                            send(1)         send(2)         send(3)           ^
    channel                 | all-reduce 1 | all-reduce 2 | all-reduce 3 |----+
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist

from pardemo.collectives import ring_all_reduce
from pardemo.collectives.channel import Channel
from pardemo.meters.timeline import Timeline

AllReduce = Callable[[torch.Tensor, dist.ProcessGroup | None], torch.Tensor]


class Sender:
    """All-reduces one tensor after the other in its channel's thread; on CUDA in a stream of its own.

    Args:
        all_reduce: ``ring_all_reduce`` goes over links of its own; another function sends as it likes, after the
            ranks have compared whose turn it is.
        name: whose gradients they are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        all_reduce: AllReduce,
        timeline: Timeline | None,
        device: torch.device,
    ):
        self._all_reduce_with, self._timeline = all_reduce, timeline
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.channel = Channel(group, name, links=all_reduce is ring_all_reduce and device.type == "cpu")
        self._sending: list[Future] = []

    def send(self, tensor: torch.Tensor, name: str, what: str) -> None:
        """Starts the sum of ``tensor``; it must not change until :meth:`wait` has returned.

        ``name`` is for the timeline, ``what`` is compared with the other ranks'.
        """
        packed = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._sending.append(self.channel.submit(self._exchange, tensor, name, what, packed))

    def wait(self) -> None:
        """Waits for all that was sent; then raises what went wrong with the first that failed."""
        sending = self.settle()
        for future in sending:
            future.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def settle(self) -> list[Future]:
        """Waits for all that was sent, whatever came of it."""
        sending, self._sending = self._sending, []
        for future in sending:
            future.exception()
        return sending

    def _exchange(self, tensor: torch.Tensor, name: str, what: str, packed: "torch.cuda.Event | None") -> None:
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            if self._stream is not None and packed is not None:
                self._stream.wait_event(packed)
            with self._timeline.span("communication", name) if self._timeline else contextlib.nullcontext():
                if self._all_reduce_with is ring_all_reduce:
                    self.channel.all_reduce(tensor, what)
                else:
                    self.channel.compare(tensor, what)
                    self._all_reduce_with(tensor, self.channel.group)
