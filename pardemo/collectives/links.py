"""Connects each rank of a group by TCP to its successor and its predecessor.

Why not ``isend`` and ``irecv`` of torch.distributed? gloo announces every message to its receiver before
sending it and hands both directions to one other thread; with a segment of 1 MiB that costs as much as the
copy itself, and with a small one, where every core computes, the other thread may wait for milliseconds for
its turn (``pardemo bench ring`` and ``pipeline`` show what plain sockets gain). A group's links are made at
the first use, belong to the group and close with it; an engine's are its own (:mod:`pardemo.collectives.channel`).
"""

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import Counter
from queue import SimpleQueue

import torch
import torch.distributed as dist

from pardemo import compat
from pardemo.cluster import latency, pacer
from pardemo.cluster.sockets import address_towards
from pardemo.world.waiting import PATIENCE_S, Wait

TIMEOUT_S = 600  # a neighbour that neither sends nor reads for so long is taken for lost
INLINE_BYTES = 64 << 10  # of a ring: below this a send is tried at once; above, copying and adding go side by side
TOKEN_BYTES = 16
#: Of both buffers in the kernel, within a host: what is on its way is still in the processor's cache when it is copied
#: out. Left to itself, the receiver's grows to 32 MiB. Between hosts it has to, since a link's delay asks for it.
BUFFER_BYTES = 1 << 20

#: Bytes that the links of this process have handed to the kernel and taken from it, for systems that count none.
counted = {"sent": 0, "received": 0}
_counting = threading.Lock()  # links are used by several threads
#: Collectives that this process has called on rings, by name.
calls: "Counter[str]" = Counter()


class Link:
    """TCP connections to the successor and from the predecessor within ``group``. Not thread-safe: hold ``lock``.

    Args:
        use: what travels on them, for messages of what went wrong.
        step: 1 for a ring that goes round in the order of the ranks, -1 for the other way.
        inline_bytes: the largest message that the caller's own thread tries to hand to the kernel.
    """

    def __init__(self, group: dist.ProcessGroup, use: str = "ring", step: int = 1, inline_bytes: int = INLINE_BYTES):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.successor, self.predecessor = (self.rank + step) % self.size, (self.rank - step) % self.size
        self.use, self.inline_bytes = use, inline_bytes
        self.exchange = use  # name of the running collective, shown by RankTimeout
        target = dist.get_global_rank(group, self.successor)
        self._source = f"rank {dist.get_global_rank(group, self.predecessor)}"
        self._target = f"rank {target}"
        self._latency_s = latency.towards(dist.get_rank(), target)
        self.lock = threading.Lock()
        address, token = _own_address(), secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen(8)
            listener.settimeout(TIMEOUT_S)
            meeting: list = [None] * self.size
            dist.all_gather_object(meeting, (address, listener.getsockname()[1], token), group=group)
            host, port, their_token = meeting[self.successor]
            try:
                self._out = socket.create_connection((host, port), TIMEOUT_S)
                self._out.sendall(their_token)
            except OSError as reason:
                raise self._cannot_send(reason) from None
            try:
                self._in = _accept(listener, token)
            except OSError as reason:
                raise self._lost(f"did not connect ({reason})") from None
        for end, neighbour in ((self._out, self.successor), (self._in, self.predecessor)):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, seconds in ((socket.SO_RCVTIMEO, PATIENCE_S), (socket.SO_SNDTIMEO, TIMEOUT_S)):
                end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
            if meeting[neighbour][0] == address:
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # the kernel takes twice of what it is told
                    end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES // 2)
        pacer.connected()
        self._queue: SimpleQueue = SimpleQueue()
        self._sent = threading.Condition()
        self._queued = self._done = 0
        self._error: Exception | None = None
        task = (self._queue, weakref.ref(self))
        threading.Thread(target=_send_queued, args=task, name=f"{use}-sender", daemon=True).start()
        self._finalizer = weakref.finalize(self, _close, self._queue, self._out, self._in)

    def send(self, data: memoryview) -> int:
        """Sends ``data`` to the successor, in the background when it is large; do not change it until it is sent.

        Returns this send's number, for :meth:`wait_sent`.
        """
        _count("sent", data)
        with self._sent:
            self._queued += 1
            number, idle = self._queued, self._done == self._queued - 1
        if idle and len(data) <= self.inline_bytes and not self._latency_s:
            try:
                data = data[self._out.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError as reason:
                raise self._cannot_send(reason) from None
            if not data:
                self._count_sent()
                return number
        if self._latency_s:  # on its way already, for its sender: what it was sent from may change
            data = memoryview(bytes(data))
        self._queue.put((data, time.monotonic() + self._latency_s))
        return number

    def wait_sent(self, number: int) -> None:
        """Waits until the memory of send ``number`` and of all earlier sends may be reused; raises a send's error."""
        number, wait = 0 if self._latency_s else number, Wait()
        with self._sent:
            while not self._sent.wait_for(lambda: self._done >= number or self._error, PATIENCE_S):
                wait.goes_on(f"{self._target} to take its part: {self.exchange}")
            wait.ends()
            if self._error:
                raise self._error

    def has_sent(self, number: int) -> bool:
        """Whether the memory of send ``number`` and of all earlier sends may be reused."""
        return bool(self._latency_s) or self._done >= number

    def flush(self) -> None:
        """Waits until the memory of all sends may be reused; raises a send's error."""
        self.wait_sent(self._queued)

    def receive(self, data: memoryview) -> None:
        """Fills ``data`` with the predecessor's next bytes."""
        _count("received", data)
        wait = Wait()
        while data:  # a signal, or a second without data, can cut even MSG_WAITALL short
            try:
                got = self._in.recv_into(data, len(data), socket.MSG_WAITALL)
            except BlockingIOError:
                wait.goes_on(f"{self._source}: {self.exchange}")
                if wait.seconds >= TIMEOUT_S:
                    raise self._lost(f"sent nothing for {TIMEOUT_S} s") from None
                continue
            except OSError as reason:
                raise self._lost(str(reason)) from None
            if got == 0:
                raise self._lost("closed the connection")
            wait.ends()
            data = data[got:]

    def close(self) -> None:
        """Closes both connections: the neighbours get a ConnectionError, and so does every later use of these links."""
        if self._latency_s and not self.closed:  # what is held back is on its way, and arrives
            with self._sent:
                self._sent.wait_for(lambda: self._done >= self._queued or self._error, PATIENCE_S + self._latency_s)
        self._finalizer()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def _lost(self, loss: str) -> ConnectionError:
        return ConnectionError(f"{self.use}: rank {self.predecessor} of the group: {loss}{self._in_words()}")

    def _cannot_send(self, reason: OSError) -> ConnectionError:
        kind = ConnectionRefusedError if isinstance(reason, ConnectionRefusedError) else ConnectionError
        ended = isinstance(reason, BrokenPipeError | ConnectionResetError)
        why = f"it has closed the connection ({reason.strerror})" if ended else str(reason)
        return kind(f"{self.use}: cannot send to rank {self.successor} of the group: {why}{self._in_words()}")

    def _in_words(self) -> str:
        return f", in {self.exchange}" if self.exchange != self.use else ""

    def _count_sent(self, error: Exception | None = None) -> None:
        with self._sent:
            self._done += 1
            self._error = self._error or error
            self._sent.notify_all()

    def _send_at(self, due_s: float, data: memoryview) -> ConnectionError | None:
        try:
            if self._latency_s:
                time.sleep(max(0.0, due_s - time.monotonic()))
            self._out.sendall(data)
        except OSError as reason:
            return self._cannot_send(reason)
        return None


def _count(way: str, data: memoryview) -> None:
    with _counting:
        counted[way] += len(data)


def _send_queued(queue: SimpleQueue, link_ref: "weakref.ref[Link]") -> None:
    """Runs the sender thread, which holds the link only while it sends: an unused link can be collected."""
    while (task := queue.get()) is not None:
        data, due_s = task
        del task
        link = link_ref()
        if link is None:
            return
        error = link._send_at(due_s, data)
        del data  # before anybody is told: who waits for the send may count what memory is left
        link._count_sent(error)
        del link


def _close(queue: SimpleQueue, *ends: socket.socket) -> None:
    queue.put(None)
    for end in ends:
        with contextlib.suppress(OSError):  # the neighbour has gone already
            end.shutdown(socket.SHUT_RDWR)  # a thread that is in the middle of a send would hold it open
        end.close()


def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Accepts the predecessor's connection, and closes any that does not begin with the token."""
    while True:
        end, _ = listener.accept()
        end.settimeout(10)
        try:
            if secrets.compare_digest(end.recv(TOKEN_BYTES, socket.MSG_WAITALL), token):
                return end
        except OSError:
            pass
        end.close()


def _own_address() -> str:
    """Returns the address at which other ranks reach this one: on the way to the master; loopback within one host."""
    return address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))


def materialized(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor`` as they may be sent: contiguous, without autograd, with lazy conjugation and negation
    carried out. A copy only where the tensor does not lie so already.

    Raises:
        TypeError: the tensor is sparse.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"a collective takes dense tensors, not {tensor.layout}: pass its to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory. Not through ``numpy()``: that fixes a storage's size for ever; ZeRO-3 empties its
    own.

    Raises:
        ValueError: the tensor has gaps, or is a lazy conjugate or negative: its memory is not its values.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        lazy = " and lazily conjugated or negated" * (tensor.is_conj() or tensor.is_neg())
        raise ValueError(
            f"the bytes of a tensor {tuple(tensor.shape)} with strides {tensor.stride()}{lazy} are not its values: "
            "pass it through materialized() first"
        )
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # a view that is still being sent keeps it alive
    return memoryview(memory).cast("B")


#: For each group, its links by what they are for.
_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Link]]" = weakref.WeakKeyDictionary()


def drop_link(group: dist.ProcessGroup, use: str) -> None:
    """Closes these links of ``group``; the neighbours get a ConnectionError, and the next use makes new links."""
    link = _links.get(group, {}).get(use)
    if link is not None:
        link.close()


def link_of(group: dist.ProcessGroup, use: str = "ring", step: int = 1, inline_bytes: int = INLINE_BYTES) -> Link:
    """Returns this rank's links in ``group`` for one ``use``; all its ranks make them together at the first call."""
    links = _links.setdefault(group, {})
    if use not in links or links[use].closed:
        with compat.without_modes():  # meters: the caller did not ask for these messages
            links[use] = Link(group, use, step, inline_bytes)
    return links[use]
