"""Bytes that this process sent and received, read from the kernel.

Linux counts every byte of every TCP connection, per socket and without privileges (``getsockopt TCP_INFO``,
fields ``tcpi_bytes_sent``, ``tcpi_bytes_retrans``, ``tcpi_notsent_bytes``, ``tcpi_bytes_received`` of
``struct tcp_info``, include/uapi/linux/tcp.h). gloo and pardemo's links move all data over TCP, so whichever
framework sent it, it is counted. nccl does not (NVLink, shared memory, InfiniBand), and other systems do not
count: there the bytes are computed from the collectives that were called, and ``evidence`` says ``count``.
"""

import os
import socket
import struct
import sys
import warnings
from typing import NamedTuple

import torch.distributed as dist

from pardemo.cluster.sockets import borrowed
from pardemo.collectives import links
from pardemo.groups import group_of
from pardemo.meters.calls import CallMeter
from pardemo.meters.figures import Figures

_NOTSENT, _RECEIVED, _SENT, _RETRANS = 144, 128, 200, 208  # offsets in struct tcp_info (Linux 4.19 and later)


class Connection(NamedTuple):
    """One TCP connection's totals since it was opened."""

    local: tuple[str, int]
    peer: tuple[str, int]
    sent_bytes: int
    received_bytes: int


def connections() -> list[Connection]:
    """All TCP connections that this process has open, with the kernel's byte counters."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with borrowed(int(name)) as end:
                if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
                    continue
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                local, peer = end.getsockname()[:2], end.getpeername()[:2]
        except OSError:  # closed meanwhile (the listing's own descriptor, too), listening, or not connected
            continue
        received, sent, again = (struct.unpack_from("Q", info, at)[0] for at in (_RECEIVED, _SENT, _RETRANS))
        waiting = struct.unpack_from("I", info, _NOTSENT)[0]
        sockets.append(Connection(local, peer, sent - again + waiting, received))
    return sockets


def kernel_counts() -> bool:
    """Whether this system's kernel counts bytes per connection."""
    if sys.platform != "linux":
        return False
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as end:
        return len(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)) >= _RETRANS + 8


class WireMeter(Figures):
    """Counts what this rank sends and receives while the block runs.

    >>> with WireMeter() as wire:                        # doctest: +SKIP
    ...     dist.all_reduce(tensor)
    >>> wire.sent_bytes, wire.received_bytes, wire.evidence   # doctest: +SKIP

    Inside a process group it is collective: all ranks of ``group`` have to enter and leave it. A barrier
    after the first reading and one after the last keep a quick neighbour's bytes on the right side; the first
    one's own bytes (under 1 kB) are in the count. A connection that is closed inside the block takes its figures
    along: where one that was open before is gone, a warning says so.

    Args:
        group: the ranks to wait for; the default group when None. Bytes to all peers are counted either way.
        evidence: ``"wire"`` or ``"count"``, to insist on one; by default wire wherever the kernel can tell.

    Attributes (after the block): ``sent_bytes``, ``received_bytes``, ``evidence``, and under ``wire``
    ``connections`` with the same per connection. A meter that a rank returns comes home with these figures.
    """

    shown = ("sent_bytes", "received_bytes", "evidence")
    kept = (*shown, "connections")

    def __init__(self, group: dist.ProcessGroup | None = None, evidence: str | None = None):
        if evidence not in (None, "wire", "count"):
            raise ValueError(f"evidence must be 'wire' or 'count', not {evidence!r}")
        nccl = dist.is_initialized() and dist.get_backend(group) == "nccl"
        self.evidence = evidence or ("count" if nccl or not kernel_counts() else "wire")
        self.sent_bytes = self.received_bytes = 0
        self.connections: list[Connection] = []
        self._group = group

    def __enter__(self) -> "WireMeter":
        self.sent_bytes = self.received_bytes = 0
        self.connections = []
        if self.evidence == "wire":
            self._before = {(c.local, c.peer): c for c in connections()}
        else:
            self._counter = CallMeter(bytes_too=True)
            self._counter.__enter__()
            self._links_before = dict(links.counted)
        self._barrier()
        return self

    def __exit__(self, *error: object) -> None:
        if self.evidence == "wire":
            after = {(c.local, c.peer): c for c in connections()}
            if lost := self._before.keys() - after.keys():
                warnings.warn(f"{len(lost)} connections closed while their bytes were counted", stacklevel=2)
            for now in after.values():
                was = self._before.get((now.local, now.peer))
                sent = now.sent_bytes - (was.sent_bytes if was else 0)
                received = now.received_bytes - (was.received_bytes if was else 0)
                if sent or received:
                    self.connections.append(Connection(now.local, now.peer, sent, received))
            self.sent_bytes = sum(c.sent_bytes for c in self.connections)
            self.received_bytes = sum(c.received_bytes for c in self.connections)
        else:
            self._counter.__exit__(*error)
            self.sent_bytes = (self._counter.sent_bytes or 0) + links.counted["sent"] - self._links_before["sent"]
            self.received_bytes = (
                (self._counter.received_bytes or 0) + links.counted["received"] - self._links_before["received"]
            )
        if not any(error):
            self._barrier()

    def by_rank(self) -> dict[int, tuple[int, int]]:
        """Bytes per peer: global rank -> (sent to it, received from it). Collective, and only under ``wire``."""
        ends: list = [None] * dist.get_world_size(self._group)
        # Both ends tell a connection: one alone may be shared, since the kernel gives a port that is taken already
        # to a second connection with another destination.
        dist.all_gather_object(ends, [(c.local, c.peer) for c in self.connections], group=self._group)
        owner = {pair: index for index, theirs in enumerate(ends) for pair in theirs}
        group = group_of(self._group)
        table: dict[int, tuple[int, int]] = {}
        for c in self.connections:
            if (c.peer, c.local) in owner:
                peer = dist.get_global_rank(group, owner[c.peer, c.local])
                sent, received = table.get(peer, (0, 0))
                table[peer] = (sent + c.sent_bytes, received + c.received_bytes)
        return table

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier(group=self._group)
