"""The rank processes of a :class:`pardemo.World`: forked together, given tasks together, ended together."""

import contextlib
import dataclasses
import operator
import os
import pickle
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pardemo import rank_registry
from pardemo.cluster import Cluster, loopback, namespaces, pacer
from pardemo.cluster.hosts import Hosts
from pardemo.deadline import Deadline
from pardemo.world import waiting
from pardemo.world.errors import STOPPED, Failure, RankDied, RankError, RankFailed, RankTimeout, exit_text
from pardemo.world.fork_server import SINGLE_THREADED, ForkServer, shared
from pardemo.world.output_streams import LinePrinter
from pardemo.world.rank_environment import RankEnvironment

START_TIMEOUT_S = 60.0
GRACE_S = 1.0  # after the first failure, how long the other ranks may take to report theirs
STACK_WAIT_S = 1.0
POLL_S = 0.5  # an interrupt that another thread received is noticed by the main thread after this time at most


class Ranks:
    """The processes of all ranks, with their control sockets, output and stacks."""

    def __init__(
        self, size: int, backend: str | None, preload: Sequence[str], threads: int, env: dict[str, str],
        cluster: Cluster | None = None,
    ):  # fmt: skip
        self.size, self.backend, self.owner = size, backend, os.getpid()
        self.fork_server: ForkServer = shared(preload)
        self.store = os.path.join(self.fork_server.folder, f"store-{secrets.token_hex(8)}")
        self.cluster, self.hosts = cluster, None
        self.tables = [f"{self.store}.links{host}" for host in range(cluster.hosts if cluster else 0)]
        if cluster is not None:
            self.hosts = _hosts(cluster)
            for table in self.tables:
                with open(table, "wb") as file:
                    file.truncate(pacer.TABLE_BYTES)
        self.started, self.ended, self.given_up = False, False, False
        self.pids: list[int] = []
        self.controls: list[Connection] = []
        self.stacks: list[Any] = []
        self.printers: list[LinePrinter] = []
        theirs: list[list[int]] = []
        try:
            for rank in range(self.size):
                theirs.append(self._open_rank(rank))  # noqa: PERF401 (so that what was opened can be closed)
            self.pids = self.fork_server.fork(theirs)
        except BaseException as error:
            self.kill()
            if isinstance(error, ImportError):
                raise ValueError(str(error)) from None
            if isinstance(error, (OSError, RuntimeError)):
                raise RankError(f"the ranks could not start: {error}") from error
            raise
        finally:
            for fd in (fd for fds in theirs for fd in fds):
                os.close(fd)
        for rank, control in enumerate(self.controls):
            with contextlib.suppress(BrokenPipeError):  # it died at birth: collect() says so
                control.send_bytes(pickle.dumps(self._rank_environment(rank, threads, env)))

    def _open_rank(self, rank: int) -> list[int]:
        """Makes this side's ends of a rank's channels and returns the rank's: control, stdout, stderr, stacks."""
        opened: list[int] = []
        try:
            opened += (end.detach() for end in socket.socketpair())
            opened += os.pipe()
            opened += os.pipe()
            stacks = tempfile.TemporaryFile("a+b")  # appended to: reading here must not move where the rank writes
            opened.append(os.dup(stacks.fileno()))
        except BaseException:  # too many open files, or an interrupt: what was opened before that is nobody's yet
            for fd in opened:
                os.close(fd)
            raise
        ours, theirs, out_r, out_w, err_r, err_w, stacks_fd = opened
        self.controls.append(Connection(ours))
        self.stacks.append(stacks)
        self.printers += [LinePrinter(out_r, rank, "stdout"), LinePrinter(err_r, rank, "stderr")]
        return [theirs, out_w, err_w, stacks_fd]

    def _rank_environment(self, rank: int, threads: int, env: dict[str, str]) -> RankEnvironment:
        beside = self.cluster.ranks_per_host if self.cluster else self.size
        adapter, address = "lo" if sys.platform == "linux" else "lo0", "127.0.0.1"
        if self.hosts:
            adapter, address = namespaces.ADAPTER, namespaces.address(0)
        return RankEnvironment(
            rank=rank, size=self.size, store=self.store, backend=self.backend, threads=threads,
            path=sys.path[:], cwd=os.getcwd(), gone=sorted(self.fork_server.inherited - os.environ.keys()),
            timeout_s=1800.0,  # of the process group; the World's own limit comes first
            **self._links_of(rank),
            env={
                **{name: value for name, value in os.environ.items() if name not in SINGLE_THREADED},
                "GLOO_SOCKET_IFNAME": adapter,
                "MASTER_ADDR": address,
                "MASTER_PORT": "0",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % beside),
                "GROUP_RANK": str(rank // beside),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(beside),
                "LOCAL_SIZE": str(beside),
                **env,
            },
        )  # fmt: skip

    def _links_of(self, rank: int) -> dict[str, Any]:
        """The rank's host, and the limits that the rank keeps itself: those that its host's adapter does not keep."""
        if self.cluster is None:
            return {}
        settings: dict[str, Any] = {"latency": (self.cluster.latency_s, self.cluster.ranks_per_host)}
        if self.cluster.tier == "none":
            return settings
        if self.hosts is None:
            return settings | {"cluster": self.cluster, "table": self.tables[0]}
        inside = dataclasses.replace(self.cluster, between=None)
        if inside.inside:
            settings |= {"cluster": inside, "table": self.tables[inside.host_of(rank)]}
        return settings | {"host": self.hosts.place(rank)}

    def limit(self, host: int, rate: float | None) -> None:
        """Limits a host's adapter from now on; None: as the cluster was made."""
        assert self.cluster is not None, "World.limit refuses it where there is no cluster"
        if self.hosts is not None:
            self.hosts.limit(host, rate if rate is not None else self.cluster.between_rate)
        elif self.cluster.tier != "none":
            pacer.set_rate(self.tables[0], host, rate or 0.0)

    def await_start(self) -> None:
        if not self.started:
            try:
                self.backend = self.collect(START_TIMEOUT_S)[0]
            except RankFailed as error:
                raise RankError(f"the ranks could not start: {error}") from None
            self.started = True

    def send(self, task: bytes) -> None:
        for control in self.controls:
            with contextlib.suppress(BrokenPipeError):
                control.send_bytes(task)

    def collect(self, timeout_s: float) -> list:
        """Waits for one reply of every rank, printing what they print, and returns the results."""
        replies: dict[int, tuple] = {}
        deaths: dict[int, int | None] = {}
        self.given_up = False
        limit, grace = Deadline(timeout_s, self.pids), None
        with selectors.DefaultSelector() as selector:
            for rank, control in enumerate(self.controls):
                selector.register(control, selectors.EVENT_READ, rank)
            for printer in self.printers:
                if not printer.closed:
                    selector.register(printer, selectors.EVENT_READ, printer)
            while len(replies) + len(deaths) < self.size:
                left_s = limit.left_s() if grace is None else min(limit.left_s(), grace.left_s())
                if self.hosts is not None and (ended := self.hosts.ended) is not None:
                    self._drain()
                    raise RankError(f"the supervisor of the hosts and their network has ended: {exit_text(ended)}")
                for key, _ in selector.select(min(left_s, POLL_S)):
                    if isinstance(key.data, LinePrinter):
                        if not key.data.pump():
                            selector.unregister(key.fileobj)
                        continue
                    rank = key.data
                    try:
                        replies[rank] = _unpack(self.controls[rank].recv_bytes())
                        failed = replies[rank][0] == "failed"
                    except (EOFError, ConnectionResetError):
                        deaths[rank] = self.fork_server.wait_exit(self.pids[rank], 2.0)
                        failed = True
                    selector.unregister(key.fileobj)
                    if failed and grace is None:
                        grace = Deadline(GRACE_S, self.pids)
                if self.given_up or not left_s:  # behind a last look: what came in time is read, however late we are
                    break
        self._drain()
        return self._judge(replies, deaths, limit)

    def _judge(self, replies: dict[int, tuple], deaths: dict[int, int | None], limit: Deadline) -> list:
        failures: dict[int, Failure] = {rank: r[1] for rank, r in replies.items() if r[0] == "failed"}
        missing = [rank for rank in range(self.size) if rank not in replies and rank not in deaths]
        if deaths:
            raise RankDied(deaths, failures)
        if failures:
            raise RankFailed(failures, missing, *(self.read_stacks(missing) if missing else ()))
        if missing:
            timeout_s, busy = min(limit.limit_s, round(limit.clock_s, 1)), limit.busy
            waits, stacks = self.read_stacks(missing)
            raise RankTimeout(timeout_s, stacks, sorted(replies), waits, busy)
        return [replies[rank][1] for rank in range(self.size)]

    def read_stacks(self, ranks: list[int]) -> tuple[dict[int, list[str]], dict[int, str]]:
        """Asks the ranks for their Python stacks; faulthandler answers even from inside a blocked call. What they wait
        for they have written down before."""
        files = [self.stacks[rank].fileno() for rank in ranks]
        noted = sizes = [os.fstat(file).st_size for file in files]
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        until, before = Deadline(STACK_WAIT_S, [self.pids[rank] for rank in ranks]), None
        # until nobody writes any more
        while until.left_s() and not (sizes == before and all(map(operator.gt, sizes, noted))):
            time.sleep(0.05)
            before, sizes = sizes, [os.fstat(file).st_size for file in files]
        waits, stacks = {}, {}
        for rank, file, size, begin in zip(ranks, files, sizes, noted, strict=True):
            text = os.pread(file, size, 0)
            waits[rank] = waiting.read_waits(text.decode("utf-8", "replace"))[0]
            new = waiting.read_waits(text[begin:].decode("utf-8", "replace"))[1]  # it may have been asked before
            stacks[rank] = _readers_part(new) or _if_stopped(self.pids[rank])
        return waits, stacks

    def _drain(self) -> None:
        for printer in self.printers:
            printer.drain()

    def close(self) -> None:
        """Asks the ranks to end, prints what they still say, and kills those that have not ended after 5 s."""
        if self.ended or self.owner != os.getpid():
            return
        for control in self.controls:
            with contextlib.suppress(OSError):
                control.send_bytes(b"")
        until, alive = Deadline(5.0, self.pids), set(self.pids)
        # in short turns: what they print at the end has to be read, too
        while alive and self.fork_server.alive and until.left_s():
            alive = {pid for pid in alive if self.fork_server.wait_exit(pid, 0.02 / len(alive)) is None}
            self._drain()
        self.kill()

    def kill(self) -> None:
        """Ends every rank process and releases all its resources."""
        if self.ended or self.owner != os.getpid():  # a fork of the notebook's process owns nothing here
            return
        self.ended = True
        if self.fork_server.alive:
            self.fork_server.kill(self.pids)
        for control in self.controls:
            control.close()
        for printer in self.printers:
            printer.close()
        for stacks in self.stacks:
            stacks.close()
        with contextlib.suppress(OSError):
            os.unlink(self.store)
        for table in self.tables:
            with contextlib.suppress(OSError):
                os.unlink(table)
        if self.hosts is not None:
            self.hosts.close()


def _hosts(cluster: Cluster) -> Hosts | None:
    """The hosts as network namespaces; None where they are not allowed, or pacing was asked for."""
    if cluster.tier in ("pacing", "none"):
        return None
    try:
        return Hosts(cluster)
    except OSError as error:
        if cluster.tier == "namespaces":
            raise ValueError(f"network namespaces cannot be made here: {error}") from None
        if not loopback.paces():
            raise ValueError(
                f"links cannot be limited here: no network namespaces ({error}), and the kernel does not pace loopback "
                "(Linux 4.13 or newer does)"
            ) from None
        return None


def _unpack(reply: bytes) -> tuple:
    """('ok', result) or ('failed', Failure); the latter, too, when the result makes no sense in this process."""
    try:
        return pickle.loads(reply)
    except Exception as error:
        message = f"the result cannot be read here: {type(error).__name__}: {error}"
        return "failed", Failure("TypeError", message, "")


def _if_stopped(pid: int) -> str:
    """What there is to say of a process that does not answer since it is stopped; nothing of any other."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended, or there is no /proc
        return ""
    return STOPPED if state == "T" else ""


def _readers_part(stack: str) -> str:
    """A faulthandler dump without the frames below the reader's function, which are the machinery's."""
    shown, ours = [], False
    for line in stack.splitlines():
        if not line.startswith("  "):  # a thread's headline
            ours = False
        ours = ours or rank_registry.is_hidden(line)
        if not ours:
            shown.append(line)
    return "\n".join(shown)
