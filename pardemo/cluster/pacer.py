"""On a rank: keeps the cluster's limits on every TCP connection that leads to another rank.

The kernel paces a socket that has ``SO_MAX_PACING_RATE`` (47), on loopback too, without any privilege. A rank finds its
connections in ``/proc/self/fd``, whoever opened them (our links, gloo, a framework), and learns whose the other end is
from a table that all ranks share: for each local port, the rank that has it.

A limit on a socket alone would give a server with seven clients seven adapters. So each rank also notes, in the same
table, to whom it has bytes on their way, and divides: a socket gets its host's share of the adapter at this end, or the
other end's share, whichever is smaller. Shares follow within :data:`TICK_S`. What this cannot do: latency, and exact
fairness while shares change.
"""

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import threading
from typing import NamedTuple

from pardemo.cluster import Cluster
from pardemo.cluster.borrowed import borrowed
from pardemo.cluster.loopback import PACING

TICK_S = 0.005
PORTS = 1 << 16
UNSENT = 0x894B  # SIOCOUTQNSD
MAX_RANKS = 64
HOSTS = PORTS + MAX_RANKS * MAX_RANKS
TABLE_BYTES = HOSTS + 8 * MAX_RANKS
_UNLIMITED = (1 << 32) - 1  # the kernel's own default


class _Peer(NamedTuple):
    """A connection to another rank."""

    fd: int
    inode: str
    port: int  # of the other end


class Pacer:
    """One rank's side: a thread that looks for connections and keeps their limits.

    Args:
        cluster: the limits. rank: this process's.
        table: a file of :data:`TABLE_BYTES` zeros that all ranks of the World share.
    """

    def __init__(self, cluster: Cluster, rank: int, table: str):
        self._cluster, self._rank = cluster, rank
        with open(table, "r+b") as file:
            self._table = mmap.mmap(file.fileno(), TABLE_BYTES)
        self._seen: dict[int, str] = {}  # fd -> inode of what has been looked at
        self._peers: dict[int, _Peer] = {}
        self._rates: dict[int, int] = {}  # fd -> limit that is set
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)

    def start(self) -> None:
        self.scan()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; limits stay as they are."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def scan(self) -> None:
        """Looks for new connections, and sets every limit anew."""
        with self._lock:
            self._look()
            self._note()
            for peer in self._peers.values():
                self._limit(peer)

    @property
    def links(self) -> dict[int, int]:
        """Other ranks that this one is connected with -> number of connections."""
        with self._lock:
            found: dict[int, int] = {}
            for peer in self._peers.values():
                other = self._owner(peer)
                if other is not None:
                    found[other] = found.get(other, 0) + 1
            return found

    def _run(self) -> None:
        while not self._end.wait(TICK_S):
            with contextlib.suppress(OSError):  # a file that was closed meanwhile
                self.scan()

    def _look(self) -> None:
        there = {}
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            with contextlib.suppress(OSError):  # closed since
                there[fd] = os.readlink(f"/proc/self/fd/{name}")
        for fd in [fd for fd, inode in self._seen.items() if there.get(fd) != inode]:
            del self._seen[fd]
            self._rates.pop(fd, None)
            self._peers.pop(fd, None)
        for fd, inode in there.items():
            if fd not in self._seen and inode.startswith("socket:"):
                self._take(fd, inode)

    def _take(self, fd: int, inode: str) -> None:
        with contextlib.suppress(OSError), borrowed(fd) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                self._seen[fd] = inode
                return
            port = connection.getsockname()[1]
            if port:
                self._table[port] = self._rank + 1
            address, other = connection.getpeername()[:2]  # OSError while it only listens: looked at again
            self._seen[fd] = inode
            if address == connection.getsockname()[0]:  # else to another host, whose adapter has a limit of its own
                self._peers[fd] = _Peer(fd, inode, other)

    def _owner(self, peer: _Peer) -> int | None:
        """The rank at the other end; None as long as it has not said so."""
        found = self._table[peer.port]
        return found - 1 if found and found - 1 != self._rank else None

    def _note(self) -> None:
        """Writes down to whom bytes are on their way."""
        busy = dict.fromkeys(range(self._cluster.size), 0)
        for peer in self._peers.values():
            other = self._owner(peer)
            if other is not None and _queued(peer.fd):
                busy[other] += 1
        for other, connections in busy.items():
            self._table[PORTS + self._rank * MAX_RANKS + other] = min(connections, 255)

    def _limit(self, peer: _Peer) -> None:
        rate = self._rate(self._owner(peer))
        if rate == self._rates.get(peer.fd):
            return
        with contextlib.suppress(OSError), borrowed(peer.fd) as connection:
            connection.setsockopt(socket.SOL_SOCKET, PACING, struct.pack("@L", rate))
            self._rates[peer.fd] = rate

    def _rate(self, other: int | None) -> int:
        """Bytes a second for a connection to a rank: its share of the link at this end, or at the other."""
        cluster, own = self._cluster, self._rank
        if other is None:  # not known yet: nobody gets more than the narrowest link
            rates = [rate for rate in (self._adapter(cluster.host_of(own)), cluster.inside_rate) if rate]
            return int(min(rates)) if rates else _UNLIMITED
        here, there = cluster.host_of(own), cluster.host_of(other)
        if here == there:
            leaving = arriving = cluster.inside_rate
            mine, theirs = [own], [other]
        else:
            leaving, arriving = self._adapter(here), self._adapter(there)
            mine, theirs = cluster.ranks_of(here), cluster.ranks_of(there)
        sharing = self._sharing(mine, theirs, own, other)
        shares = [rate / n for rate, n in zip((leaving, arriving), sharing, strict=True) if rate]
        return int(min(shares)) if shares else _UNLIMITED

    def _adapter(self, host: int) -> float | None:
        """Bytes a second of a host's adapter: what the World has said since, or what the cluster was made with."""
        (said,) = struct.unpack_from("d", self._table, HOSTS + 8 * host)
        return said or self._cluster.between_rate

    def _sharing(self, mine: list[int], theirs: list[int], own: int, other: int) -> tuple[int, int]:
        """How many busy connections share the link at this end, and at the other; this one included."""
        everybody, host_of = range(self._cluster.size), self._cluster.host_of
        inside = host_of(own) == host_of(other)
        leaving = sum(self._busy(a, b) for a in mine for b in everybody if (host_of(a) == host_of(b)) == inside)
        arriving = sum(self._busy(a, b) for a in everybody for b in theirs if (host_of(a) == host_of(b)) == inside)
        waiting = not self._busy(own, other)
        return leaving + waiting, arriving + waiting

    def _busy(self, sender: int, receiver: int) -> int:
        return self._table[PORTS + sender * MAX_RANKS + receiver]


def _queued(fd: int) -> int:
    """Bytes that a connection still has to send; 0 where it is gone.

    Not those that were sent and not yet acknowledged: the acknowledgement of a barrier's byte may take 40 ms, and all
    that while the connection would count as one that shares the link.
    """
    try:
        return struct.unpack("i", fcntl.ioctl(fd, UNSENT, b"\0" * 4))[0]
    except OSError:
        return 0


def say(table: str, host: int, rate: float) -> None:
    """The World's word to its ranks: a host's adapter now carries ``rate`` bytes a second; 0: as it was made."""
    with open(table, "r+b") as file:
        file.seek(HOSTS + 8 * host)
        file.write(struct.pack("d", rate))


_current: Pacer | None = None


def start(cluster: Cluster, rank: int, table: str) -> Pacer:
    """Makes this process's pacer. Connections of new process groups are paced before their first message."""
    global _current
    from torch.distributed import distributed_c10d

    _current = Pacer(cluster, rank, table)
    _current.start()
    make = distributed_c10d._new_process_group_helper

    def make_and_pace(*args, **kwargs):
        found = make(*args, **kwargs)
        _current.scan()
        return found

    distributed_c10d._new_process_group_helper = make_and_pace
    return _current


def connected() -> None:
    """Said by whoever has just opened a connection: its limit is there before the first byte."""
    if _current is not None:
        _current.scan()
