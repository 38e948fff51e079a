"""World: N real ranks, driven from a notebook or a script.

Each rank is a process of its own with ``torch.distributed`` ready in it, forked from a warm nursery
(:mod:`pardemo.nursery`), so that starting four of them takes tens of milliseconds. The same experiment
functions also run as the ranks of a job that another launcher started, on one host or many::

    torchrun --nnodes 2 --nproc-per-node 4 ... -m pardemo.world MODULE:FUNCTION [ARGS]
"""

import contextlib
import os
import pickle
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pardemo.errors import Failure, RankDied, RankError, RankFailed, RankTimeout
from pardemo.nursery import Nursery, nursery
from pardemo.streams import LinePrinter

MAX_RANKS = 64
START_TIMEOUT_S = 60.0
GRACE_S = 1.0  # after the first failure, how long the other ranks may take to report theirs
STACK_WAIT_S = 1.0
POLL_S = 0.5  # an interrupt that another thread received is noticed by the main thread after this time at most


class World:
    """``size`` ranks with a default process group (gloo on CPUs, nccl on GPUs).

    >>> with World(4) as world:                     # doctest: +SKIP
    ...     world.run(my_function, nbytes)          # my_function(nbytes) on every rank -> [4 results]

    Args:
        size: number of ranks, 1 to 64.
        preload: modules to have loaded before the ranks are forked (``"deepspeed"``, ``"transformers"`` …).
            The first World with a given set pays for the import, later ones do not.
        threads: torch threads per rank.
        backend: ``"gloo"`` or ``"nccl"``; by default nccl where every rank can have a GPU of its own.
        timeout_s: time limit of a :meth:`run` that names none.
        env: environment variables for the ranks, on top of this process's.

    Raises:
        ValueError, TypeError: ``size`` or ``threads`` out of range.
        RankError: the ranks could not start.

    The ranks stay between calls of :meth:`run`. After a failure, a timeout or an interrupt they are
    replaced by fresh ones, so the next ``run`` works. Nothing is left running when the World is closed,
    garbage collected, or its process ends, even by SIGKILL.
    """

    def __init__(
        self,
        size: int,
        *,
        preload: Sequence[str] = (),
        threads: int = 1,
        backend: str | None = None,
        timeout_s: float = 300.0,
        env: dict[str, str] | None = None,
    ):
        self.size = _whole("World size", size, MAX_RANKS)
        self.threads = _whole("threads", threads, 1024)
        if backend not in (None, "gloo", "nccl"):
            raise ValueError(f"backend must be 'gloo', 'nccl' or None, not {backend!r}")
        if isinstance(preload, str):
            raise TypeError(f"preload is a list of module names; write [{preload!r}]")
        self.preload, self.timeout_s = tuple(preload), timeout_s
        self.backend: str | None = backend
        self._env = dict(env or {})
        self._busy = threading.Lock()
        self._ranks: _Ranks | None = None
        self._closed = False
        self._start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else ("idle" if self._ranks else "to be started again")
        return f"<World of {self.size} ranks, {self.backend or 'backend not known yet'}, {state}>"

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that run now (none after a failure, until the next :meth:`run`)."""
        return list(self._ranks.pids) if self._ranks else []

    def run(self, function: Callable, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list:
        """Calls ``function(*args, **kwargs)`` on every rank and returns the results in the order of the ranks.

        Functions, classes and closures defined in the notebook work. What ranks print appears here, each
        line marked with its rank.

        Raises:
            TypeError: the function or an argument cannot be pickled.
            RankFailed: it raised on one or more ranks; RankDied: a rank's process ended;
            RankTimeout: not all ranks finished within ``timeout_s`` seconds.
        """
        if self._closed:
            raise RankError("this World is closed; make a new one")
        limit = self.timeout_s if timeout_s is None else timeout_s
        if not limit > 0:
            raise ValueError(f"timeout_s must be above 0, not {limit!r}")
        task = _pack(function, args, kwargs)
        if not self._busy.acquire(blocking=False):
            raise RankError("this World is busy with another run (of another thread); give each thread its own World")
        try:
            if self._ranks is None:
                self._start()
            ranks = self._ranks
            try:
                ranks.await_start()
                self.backend = ranks.backend
                ranks.send(task)
                return ranks.collect(limit)
            except BaseException:  # interrupts too: whatever the ranks were doing is ended
                self._drop()
                raise
        finally:
            self._busy.release()

    def close(self) -> None:
        """Ends the ranks in an orderly way; what does not end within 5 s is killed. Safe to call twice."""
        self._closed = True
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            ranks.close()

    def _start(self) -> None:
        self._ranks = _Ranks(self)
        self._finalizer = weakref.finalize(self, self._ranks.kill)

    def _drop(self) -> None:
        if self._ranks is not None:
            self._ranks = None
            self._finalizer()  # kills them


class _Ranks:
    """One generation of rank processes: forked together, ended together."""

    def __init__(self, world: World):
        self.size, self.backend, self.owner = world.size, world.backend, os.getpid()
        self.nursery: Nursery = nursery(world.preload)
        self.store = os.path.join(self.nursery.folder, f"store-{secrets.token_hex(8)}")
        self.started, self.ended = False, False
        self.pids: list[int] = []
        self.controls: list[Connection] = []
        self.stacks: list[Any] = []
        self.printers: list[LinePrinter] = []
        theirs = [self._open_rank(rank) for rank in range(self.size)]
        try:
            self.pids = self.nursery.fork(theirs)
        except BaseException as error:
            self.kill()
            if isinstance(error, ImportError):
                raise ValueError(str(error)) from None
            raise
        finally:
            for fd in (fd for fds in theirs for fd in fds):
                os.close(fd)
        for rank, control in enumerate(self.controls):
            with contextlib.suppress(BrokenPipeError):  # it died at birth: collect() says so
                control.send_bytes(pickle.dumps(self._join_settings(world, rank)))

    def _open_rank(self, rank: int) -> list[int]:
        """Makes this side's ends of a rank's channels and returns the rank's: control, stdout, stderr, stacks."""
        ours, theirs = socket.socketpair()
        (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe()
        stacks = tempfile.TemporaryFile("w+")
        self.controls.append(Connection(ours.detach()))
        self.stacks.append(stacks)
        self.printers += [LinePrinter(out_r, rank, "stdout"), LinePrinter(err_r, rank, "stderr")]
        return [theirs.detach(), out_w, err_w, os.dup(stacks.fileno())]

    def _join_settings(self, world: World, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "size": world.size,
            "store": self.store,
            "backend": world.backend,
            "threads": world.threads,
            "path": sys.path[:],
            "cwd": os.getcwd(),
            "timeout_s": 1800.0,  # of the process group; the World's own limit comes first
            "env": {
                "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world.size),
                "LOCAL_WORLD_SIZE": str(world.size),
                "LOCAL_SIZE": str(world.size),
                **world._env,
            },
        }

    def await_start(self) -> None:
        if not self.started:
            self.backend = self.collect(START_TIMEOUT_S)[0]
            self.started = True

    def send(self, task: bytes) -> None:
        for control in self.controls:
            with contextlib.suppress(BrokenPipeError):
                control.send_bytes(task)

    def collect(self, timeout_s: float) -> list:
        """Waits for one reply of every rank, printing what they print, and returns the results."""
        replies: dict[int, tuple] = {}
        deaths: dict[int, int | None] = {}
        deadline = time.monotonic() + timeout_s
        grace_over = None
        with selectors.DefaultSelector() as selector:
            for rank, control in enumerate(self.controls):
                selector.register(control, selectors.EVENT_READ, rank)
            for printer in self.printers:
                if not printer.closed:
                    selector.register(printer, selectors.EVENT_READ, printer)
            while len(replies) + len(deaths) < self.size:
                now = time.monotonic()
                end = deadline if grace_over is None else min(deadline, grace_over)
                if now >= end:
                    break
                for key, _ in selector.select(min(end - now, POLL_S)):
                    if isinstance(key.data, LinePrinter):
                        if not key.data.pump():
                            selector.unregister(key.fileobj)
                        continue
                    rank = key.data
                    try:
                        replies[rank] = _unpack(self.controls[rank].recv_bytes())
                        failed = replies[rank][0] == "failed"
                    except (EOFError, ConnectionResetError):
                        deaths[rank] = self.nursery.wait_exit(self.pids[rank], 2.0)
                        failed = True
                    selector.unregister(key.fileobj)
                    if failed and grace_over is None:
                        grace_over = time.monotonic() + GRACE_S
        self._drain()
        return self._judge(replies, deaths, timeout_s)

    def _judge(self, replies: dict[int, tuple], deaths: dict[int, int | None], timeout_s: float) -> list:
        failures: dict[int, Failure] = {rank: r[1] for rank, r in replies.items() if r[0] == "failed"}
        missing = [rank for rank in range(self.size) if rank not in replies and rank not in deaths]
        if deaths:
            raise RankDied(deaths, failures)
        if failures:
            raise RankFailed(failures, missing)
        if missing:
            raise RankTimeout(timeout_s, self._read_stacks(missing), sorted(replies))
        return [replies[rank][1] for rank in range(self.size)]

    def _read_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Asks the ranks for their Python stacks; faulthandler answers even from inside a blocked call."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        texts = dict.fromkeys(ranks, "")
        until = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < until and not all(t.endswith("\n") for t in texts.values()):
            time.sleep(0.02)
            for rank in ranks:
                self.stacks[rank].seek(0)
                texts[rank] = self.stacks[rank].read()
        return {rank: _readers_part(text) for rank, text in texts.items()}

    def _drain(self) -> None:
        for printer in self.printers:
            printer.drain()

    def close(self) -> None:
        for control in self.controls:
            with contextlib.suppress(OSError):
                control.send_bytes(b"")
        until = time.monotonic() + 5.0
        for pid in self.pids:
            self.nursery.wait_exit(pid, max(0.0, until - time.monotonic()))
        self._drain()
        self.kill()

    def kill(self) -> None:
        """Ends every process of this generation and lets go of all its resources."""
        if self.ended or self.owner != os.getpid():  # a fork of the notebook's process owns nothing here
            return
        self.ended = True
        if self.nursery.alive:
            self.nursery.kill(self.pids)
        for control in self.controls:
            control.close()
        for printer in self.printers:
            printer.close()
        for stacks in self.stacks:
            stacks.close()
        with contextlib.suppress(OSError):
            os.unlink(self.store)


def _whole(what: str, value: int, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number, not {value!r}")
    if not 1 <= value <= limit:
        raise ValueError(f"{what} must be from 1 to {limit}, not {value}")
    return value


def _unpack(reply: bytes) -> tuple:
    """('ok', result) or ('failed', Failure); the latter, too, when the result makes no sense in this process."""
    try:
        return pickle.loads(reply)
    except Exception as error:
        message = f"the result cannot be read here: {type(error).__name__}: {error}"
        return "failed", Failure("TypeError", message, "")


def _readers_part(stack: str) -> str:
    """A faulthandler dump without the frames of the machinery below the reader's function."""
    ours = ("pardemo/rank.py", "pardemo/nursery.py", '"<string>"')
    return "\n".join(line for line in stack.splitlines() if not any(mark in line for mark in ours))


def _pack(function: Callable, args: tuple, kwargs: dict) -> bytes:
    import cloudpickle

    if not callable(function):
        raise TypeError(f"World.run needs a function, not {function!r}")
    try:
        return cloudpickle.dumps((function, args, kwargs))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"cannot send {name} to the ranks: {error}. Open files, locks and sockets do not travel; "
            "make them inside the function"
        ) from None


if __name__ == "__main__":
    from pardemo.launched import main

    sys.exit(main())
