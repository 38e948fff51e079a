"""Starts the fork server: a process that has torch loaded, from which ranks are forked.

Importing torch costs seconds, forking a process that has already done so costs a millisecond. The server is started
once per Python process and set of preloaded modules, imports them, stays single-threaded (only then is forking safe),
and forks a rank whenever asked. It reaps the ranks, reports how each ended, and kills every one of them with its
descendants when the parent is gone, even when the parent was killed by SIGKILL. Here is the parent's side; what runs
in the process itself is :mod:`pardemo.world.fork_server_process`.

The standard library's forkserver was not enough: it is one per process, re-imports the caller's main
script in every child, and leaves its children behind when the parent is killed.
"""

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pardemo import rank_registry
from pardemo.deadline import Deadline, ended_within

RANK = "pardemo.world.rank:main"
START_TIMEOUT_S = 120  # importing deepspeed and transformers on a cold disk
#: One thread each while the libraries load, and in the ranks: a process with threads cannot be forked safely.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a preloaded module asks for GPUs: without starting CUDA, or forks lose it
}
#: Modules that every rank needs. Torch's compiler is one that any optimizer imports when it is made, a second each.
PRELOADED = (
    "numpy.random",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "cloudpickle",
    "pardemo.world.rank",
    *rank_registry.PRELOAD,
)


class ForkServer:
    """The parent's handle on a fork server. Thread-safe: each request waits for its reply.

    ``main``: what each fork runs, ``module:function``, with four descriptors; ``start`` makes the process.
    """

    def __init__(self, preload: Sequence[str], main: str, start: Callable[..., Any] | None = None):
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._exits: dict[int, int] = {}
        self._socket, theirs = socket.socketpair()
        _handles.add(self)
        inside = inherited_folder if os.path.isdir(inherited_folder) else None
        self.folder = tempfile.mkdtemp(prefix="pardemo-", dir=inside)  # removed by it, even when this process is killed
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others, too
        self.inherited = frozenset(os.environ)  # what ranks find, unless it is taken away again
        settings = {"fd": theirs.fileno(), "path": path, "preload": list(preload), "folder": self.folder, "main": main}
        try:
            with theirs:
                self._process = (start or _spawned)(theirs, settings)
        except BaseException:  # no memory, too many open files, an interrupt: nobody else knows of the folder
            _handles.discard(self)
            self._socket.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._buffer = b""
        self._broken = False
        self._ready = False
        self._child_servers = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._broken and self._owner == os.getpid() and self._process.poll() is None

    def fork(self, fds_of_ranks: Sequence[Sequence[int]]) -> list[int]:
        """Forks ranks that each own copies of their descriptors (control, stdout, stderr, stacks); their pids."""
        with self._lock:
            try:
                self._wait_ready()
                for fds in fds_of_ranks:
                    socket.send_fds(self._socket, [b'{"do": "fork"}\n'], list(fds))
                forked = lambda message: "pid" in message  # noqa: E731
                pids = [self._read(forked, START_TIMEOUT_S)["pid"] for _ in fds_of_ranks]
            except BaseException:  # an interrupt, too: replies would be taken for those to later requests
                self._broken = True
                self.close()
                raise
            for pid in pids:
                self._exits.pop(pid, None)  # of an earlier rank that had this number
            return pids

    def fork_server(self, theirs: socket.socket, settings: dict[str, Any]) -> "Forked":
        """Forks another fork server, which has loaded what this one has."""
        with self._lock:
            self._wait_ready()
            self._child_servers += 1  # the answer to one that was interrupted is known by its number, and passed over
            number = self._child_servers
            request = {"do": "server", "number": number, "settings": settings, "env": _environment()}
            socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], [theirs.fileno()])
            answer = self._read(lambda message: message.get("server") == number, START_TIMEOUT_S)
            return Forked(answer["pid_of_server"])

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL for those ranks and all their descendants in the same process group."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps({"do": "kill", "pids": list(pids)}).encode() + b"\n")

    def wait_exit(self, pid: int, timeout_s: float) -> int | None:
        """Waits for a rank's end; returns its exit code, negative for a signal, or None if it has not ended in time."""
        with self._lock:
            try:
                self._read(lambda _: pid in self._exits, timeout_s)
            except (OSError, RuntimeError):
                return None
            return self._exits.pop(pid)

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        self._socket.close()  # the server sees it, kills its ranks and ends
        if not ended_within(self._process, 5.0):
            self._process.kill()
            self._process.wait()
        self.clear_up()

    def clear_up(self) -> None:
        """Removes the folder of a process that was killed, and so could not do it itself."""
        if self._owner == os.getpid() and self._process.poll() is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_ready(self) -> None:
        if not self._ready:
            self._read(lambda message: "ready" in message, START_TIMEOUT_S)
            self._ready = True

    def _read(self, wanted: Callable[[dict], bool], timeout_s: float) -> dict:
        """Reads messages until ``wanted`` says so; keeps notices of ended ranks on the way."""
        message: dict = {}
        deadline = Deadline(timeout_s, [self.pid])
        while not wanted(message):
            while b"\n" not in self._buffer:
                left_s = deadline.left_s()
                if not readable(self._socket.fileno(), left_s):
                    if left_s:
                        continue
                    raise RuntimeError(f"the process that ranks start from did not answer within {deadline}")
                data = self._socket.recv(65536)
                if not data:
                    raise RuntimeError("the process that ranks start from has ended")
                self._buffer += data
            line, _, self._buffer = self._buffer.partition(b"\n")
            message = json.loads(line)
            if "error" in message:
                raise ImportError(message["error"])
            if "exited" in message:
                self._exits[message["exited"]] = message["code"]
        return message


class Forked:
    """A process that was forked, in the form of :class:`subprocess.Popen`; its exit code is not known. Linux alone."""

    stdin = stdout = stderr = None
    _fd = -1  # until the kernel has given one; it may refuse, with too many files open

    def __init__(self, pid: int):
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def __del__(self):
        if self._fd >= 0:
            os.close(self._fd)

    def poll(self) -> int | None:
        return 0 if readable(self._fd) else None

    def wait(self, timeout: float | None = None) -> int:
        timeout = 1e6 if timeout is None else timeout
        if not readable(self._fd, timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return 0

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _environment() -> dict[str, str]:
    return {"TOKENIZERS_PARALLELISM": "false", **os.environ, **SINGLE_THREADED}


def _spawned(theirs: socket.socket, settings: dict[str, Any]) -> subprocess.Popen:
    begin = "from pardemo.world.fork_server_process import serve; import sys; serve(sys.argv[1])"
    return subprocess.Popen(
        [sys.executable, "-c", begin, json.dumps(settings)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=_environment() | {"PYTHONPATH": os.pathsep.join(settings["path"])},
        start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
    )


def _forked(theirs: socket.socket, settings: dict[str, Any]) -> Forked:
    pid = os.fork()
    if pid:
        return Forked(pid)
    try:
        os.setsid()
        from pardemo.world.fork_server_process import serve

        serve(json.dumps(settings))
    finally:
        os._exit(1)


def fork_here() -> None:
    """Forks this process into its fork server, while it has one thread and all of ``PRELOADED`` loaded."""
    _servers[RANK, PRELOADED] = ForkServer(PRELOADED, RANK, _forked)


#: In a process that was forked from a fork server: the server's folder. The server may end what this process has
#: started before that could clear up, and removes all that lies in its folder when it ends itself.
inherited_folder = ""
_handles: weakref.WeakSet[ForkServer] = weakref.WeakSet()
_servers: dict[tuple[str, tuple[str, ...]], ForkServer] = {}  # by what it runs and what it has loaded
_servers_lock = threading.Lock()


def shared(preload: Sequence[str] = (), main: str = RANK) -> ForkServer:
    """The fork server with these modules loaded; started on first use, shared by all Worlds of this process."""
    key = main, (*PRELOADED, *sorted(set(preload) - set(PRELOADED)))
    with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.alive:
            if server is not None:
                server.clear_up()
            server = _servers[key] = _new(*key)
        return server


def _new(main: str, preload: tuple[str, ...]) -> ForkServer:
    base = _largest_part(preload)
    if base is not None and sys.platform == "linux":
        with contextlib.suppress(OSError, RuntimeError, ImportError):  # it has ended meanwhile
            return ForkServer(preload, main, base.fork_server)  # what that one has loaded need not be loaded again
    return ForkServer(preload, main)


def _largest_part(preload: tuple[str, ...]) -> ForkServer | None:
    """The fork server that has loaded most of these modules, of those that have loaded and called nothing else."""
    parts = {loaded: server for (_, loaded), server in _servers.items() if set(loaded) <= set(preload) and server.alive}
    called = [loaded for loaded in parts if any(":" in name for name in loaded)]  # a call may be made only once
    return parts[max(parts.keys() - called, key=len)] if len(parts) > len(called) else None


def running() -> list[ForkServer]:
    """The fork servers of this process that run now."""
    return [handle for handle in list(_handles) if handle.alive]


def readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Whether there is something to read (the end of file, too). For any descriptor: select() ends at 1,024."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def _let_go_after_fork() -> None:
    """Closes the sockets in a fork of this process: their end tells the servers that their parent is gone."""
    for handle in list(_handles):
        handle._socket.close()


os.register_at_fork(after_in_child=_let_go_after_fork)


@atexit.register
def _close_all() -> None:
    for handle in list(_handles):
        handle.close()
