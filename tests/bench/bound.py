"""What bounds an all-reduce between processes of one machine: the work that none of them can do without.

Before N ranks hold the sum of N tensors of S bytes, 2(N−1)·S bytes have gone from a rank to another, whatever the
order: each of the N−1 tensors that are added to another has to come to it, and each of the N−1 ranks where a sum was
not made has to get it. Over sockets every one of these bytes is copied twice, into the kernel and out of it. Half of
them are added to a tensor in memory, which is read and written for it; the other half, the sums, is written to it. All
ranks together have the machine's cores for that, and no more.

So the bound is the cores' time for this work, divided by the cores. It is measured where it is cheapest: each rank
sends to itself, over a TCP connection of loopback, in one thread. Nobody waits for anybody, no thread is woken, no
byte goes to another core, and what is sent and the place of what arrives stay in the cache; only the tensor, which
every all-reduce has to read and write, lies where it lies. The seconds are those that the threads had a core for
(``time.thread_time``), not those of the clock, so that it is no matter how the ranks are shared out among the cores.
"""

import contextlib
import select
import socket
import time
from collections.abc import Iterator, Sequence

import torch

from pardemo.collectives.links import bytes_of

BLOCK_NUMEL = 1 << 18  # 1 MiB in fp32: of 16 KiB to 1 MiB the size whose bytes cost least
LONGEST_S = 60


@contextlib.contextmanager
def to_itself() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection of this process with itself: the end that sends, which never waits, and the other one."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as out:
        into, _ = listener.accept()
        with into:
            out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            out.setblocking(False)
            into.settimeout(LONGEST_S)
            yield out, into


def work(out: socket.socket, into: socket.socket, tensor: torch.Tensor, size: int) -> float:
    """A rank's share of what ``size`` ranks have to do for the sum of tensors like this one; the result is no sum.

    Args:
        out, into: both ends of a connection (:func:`to_itself`).
        tensor: [S/4] in fp32. 2(N−1)/N of it are sent and received; half of that is added to it, half written to it.

    Returns:
        Seconds of a core.
    """
    half = (size - 1) * (tensor.numel() // size)
    block, inbox = torch.empty(2, min(BLOCK_NUMEL, half)).zero_()  # in memory and in the cache from here on
    begin = time.thread_time()
    for piece in tensor[:half].split(BLOCK_NUMEL):
        arrived = inbox[: piece.numel()]
        _through_the_kernel(out, into, block, arrived)
        piece.add_(arrived)
    for piece in tensor[-half:].split(BLOCK_NUMEL):
        _through_the_kernel(out, into, block, piece)
    return time.thread_time() - begin


def seconds(of_ranks: Sequence[Sequence[float]], cores: int) -> list[float]:
    """The bound in each round: what all ranks' work took of a core, divided by the cores.

    Args:
        of_ranks: [N][rounds] what :func:`work` returned.
    """
    return [sum(each) / cores for each in zip(*of_ranks, strict=True)]


def _through_the_kernel(out: socket.socket, into: socket.socket, block: torch.Tensor, target: torch.Tensor) -> None:
    """Fills ``target`` with as many bytes of ``block``, part by part as the kernel has room for them."""
    source, place = bytes_of(block)[: target.nbytes], bytes_of(target)
    while source:
        try:
            sent = out.send(source)
        except BlockingIOError:  # all that was sent has been received, but the kernel does not know yet
            select.select([], [out], [], LONGEST_S)
            continue
        source = source[sent:]
        while sent:
            got = into.recv_into(place, sent)
            place, sent = place[got:], sent - got
