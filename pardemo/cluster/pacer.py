"""Limits every TCP connection of a rank that leads to another rank, as the cluster says.

The kernel paces a socket that has ``SO_MAX_PACING_RATE`` (47), on loopback too, without any privilege. A rank finds its
connections in ``/proc/self/fd``, whoever opened them (our links, gloo, a framework), and learns whose the other end is
from a table that all ranks share: for each local port, the rank that has it.

A limit on a socket alone would give a server with seven clients seven cards. So each rank also notes, in the same
table, to whom it has bytes on their way, and divides: a socket gets its host's share of the card at this end, or the
other end's share, whichever is smaller. Shares follow within :data:`TICK_S`. What this cannot do: latency, and exact
fairness while shares change.
"""

import contextlib
import fcntl
import mmap
import os
import socket
import stat
import struct
import threading

from pardemo import compat
from pardemo.cluster import MAX_RANKS, Cluster
from pardemo.cluster.loopback import PACING
from pardemo.cluster.sockets import borrowed

TICK_S = 0.005
PORTS = 1 << 16
UNSENT = 0x894B  # SIOCOUTQNSD
HOSTS = PORTS + MAX_RANKS * MAX_RANKS
TABLE_BYTES = HOSTS + 8 * MAX_RANKS
_UNLIMITED = (1 << 32) - 1  # the kernel's own default


class Pacer:
    """One rank's side: a thread that looks for connections and keeps their limits.

    Args:
        cluster: the limits. rank: this process's.
        table: a file of :data:`TABLE_BYTES` zeros that all ranks of the World share.
    """

    def __init__(self, cluster: Cluster, rank: int, table: str):
        self._cluster, self._rank = cluster, rank
        self._between, self._inside = cluster.between_rate, cluster.inside_rate
        with open(table, "r+b") as file:
            self._table = mmap.mmap(file.fileno(), TABLE_BYTES)
        self._seen: dict[int, tuple[int, int]] = {}  # fd -> which file it was when it was looked at
        self._peers: dict[int, int] = {}  # fd of a connection to another rank -> port of its other end
        self._rates: dict[int, int] = {}  # fd -> limit that is set
        self._state: tuple | None = None  # what the limits that are set were computed from
        self._places: dict[int, tuple[list[int], list[int]]] = {}  # cache of `_sharing(other)`
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
        """Looks for new connections, and sets the limits that are others now.

        Two hundred times a second on each rank, on the cores that the ranks compute with: where nothing has changed,
        nothing is computed.
        """
        with self._lock:
            self._look()
            others = [self._owner(port) for port in self._peers.values()]
            self._note(others)
            busy = self._table[PORTS : PORTS + self._cluster.size * MAX_RANKS]
            state = list(self._peers), others, busy, self._table[HOSTS:TABLE_BYTES]
            if state != self._state:
                rates = {other: self._rate(other, busy) for other in set(others)}
                limits = [self._limit(fd, rates[other]) for fd, other in zip(self._peers, others, strict=True)]
                self._state = state if all(limits) else None

    @property
    def links(self) -> dict[int, int]:
        """Other ranks that this one is connected with -> number of connections."""
        with self._lock:
            counts: dict[int, int] = {}
            for port in self._peers.values():
                other = self._owner(port)
                if other is not None:
                    counts[other] = counts.get(other, 0) + 1
            return counts

    def _run(self) -> None:
        while not self._end.wait(TICK_S):
            with contextlib.suppress(OSError):  # a file that was closed meanwhile
                self.scan()

    def _look(self) -> None:
        there = {}
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                status = os.fstat(fd)
            except OSError:  # closed since
                continue
            there[fd] = status.st_dev, status.st_ino
            if fd not in self._seen and not stat.S_ISSOCK(status.st_mode):
                self._seen[fd] = there[fd]
        for fd in [fd for fd, file in self._seen.items() if there.get(fd) != file]:
            for known in (self._seen, self._rates, self._peers):
                known.pop(fd, None)
            self._state = None  # another connection may have this number now, and has no limit yet
        for fd in there.keys() - self._seen.keys():
            self._take(fd, there[fd])

    def _take(self, fd: int, file: tuple[int, int]) -> None:
        with contextlib.suppress(OSError), borrowed(fd) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                self._seen[fd] = file
                return
            port = connection.getsockname()[1]
            if port:
                self._table[port] = self._rank + 1
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # it only listens, to its end
                self._seen[fd] = file
                return
            address, other = connection.getpeername()[:2]  # OSError while nobody answers: looked at again
            self._seen[fd] = file
            if address == connection.getsockname()[0]:  # else to another host, whose card has a limit of its own
                self._peers[fd] = other

    def _owner(self, port: int) -> int | None:
        """The rank that has this port; None as long as it has not said so."""
        owner = self._table[port]
        return owner - 1 if owner and owner - 1 != self._rank else None

    def _note(self, others: list[int | None]) -> None:
        """Writes down to whom bytes are on their way: how many connections to each rank have some."""
        busy = bytearray(MAX_RANKS)
        for fd, other in zip(self._peers, others, strict=True):
            if other is not None and busy[other] < 255 and _queued(fd):
                busy[other] += 1
        first_port = PORTS + self._rank * MAX_RANKS
        self._table[first_port : first_port + MAX_RANKS] = bytes(busy)

    def _limit(self, fd: int, rate: int) -> bool:
        """Sets the limit of a connection where it is another; whether it is set."""
        if rate != self._rates.get(fd):
            with contextlib.suppress(OSError), borrowed(fd) as connection:
                connection.setsockopt(socket.SOL_SOCKET, PACING, struct.pack("@L", rate))
                self._rates[fd] = rate
        return rate == self._rates.get(fd)

    def _rate(self, other: int | None, busy: bytes) -> int:
        """Bytes a second for a connection to a rank: its share of the link at this end, or at the other.

        Args:
            busy: of each rank to each, the connections that have bytes on their way.
        """
        here = self._cluster.host_of(self._rank)
        if other is None:  # not known yet: nobody gets more than the narrowest link
            links = self._adapter(here), self._inside
            return int(min((rate for rate in links if rate), default=_UNLIMITED))
        there = self._cluster.host_of(other)
        links = (self._inside, self._inside) if here == there else (self._adapter(here), self._adapter(there))
        waiting = not busy[self._rank * MAX_RANKS + other]
        sharing = [sum(map(busy.__getitem__, places)) + waiting for places in self._sharing(other)]
        return int(min((rate / n for rate, n in zip(links, sharing, strict=True) if rate), default=_UNLIMITED))

    def _adapter(self, host: int) -> float | None:
        """Bytes a second of a host's adapter: what the World has said since, or what the cluster was made with."""
        (rate,) = struct.unpack_from("d", self._table, HOSTS + 8 * host)
        return rate or self._between

    def _sharing(self, other: int) -> tuple[list[int], list[int]]:
        """Where it stands how many connections share the link to that rank with this one: at this end, at the other."""
        rank, cluster = self._rank, self._cluster
        entries = self._places.get(other)
        if entries is None:
            everybody, host_of = range(cluster.size), cluster.host_of
            here, there = host_of(rank), host_of(other)
            inside = here == there
            mine, theirs = ([rank], [other]) if inside else (cluster.ranks_of(here), cluster.ranks_of(there))
            alike = [(a, b) for a in everybody for b in everybody if (host_of(a) == host_of(b)) == inside]
            leaving = [a * MAX_RANKS + b for a, b in alike if a in mine]
            arriving = [a * MAX_RANKS + b for a, b in alike if b in theirs]
            entries = self._places[other] = leaving, arriving
        return entries


def _queued(fd: int) -> int:
    """Bytes that a connection still has to send; 0 where it is gone.

    Not those that were sent and not yet acknowledged: the acknowledgement of a barrier's byte may take 40 ms, and all
    that while the connection would count as one that shares the link.
    """
    try:
        return struct.unpack("i", fcntl.ioctl(fd, UNSENT, b"\0" * 4))[0]
    except OSError:
        return 0


def set_rate(table: str, host: int, rate: float) -> None:
    """Tells the ranks of a World that a host's network card now carries ``rate`` bytes a second; 0: as it was made."""
    with open(table, "r+b") as file:
        file.seek(HOSTS + 8 * host)
        file.write(struct.pack("d", rate))


_current: Pacer | None = None


def start_pacer(cluster: Cluster, rank: int, table: str) -> Pacer:
    """Makes this process's pacer. Connections of new process groups are paced before their first message."""
    global _current
    _current = Pacer(cluster, rank, table)
    _current.start()
    compat.after_new_group(_current.scan)
    return _current


def connected() -> None:
    """Sets the limits of connections that have just been opened, before their first byte."""
    if _current is not None:
        _current.scan()
