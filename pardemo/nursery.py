"""A warm process that ranks are forked from.

Importing torch costs seconds, forking a process that has already done so costs a millisecond. The
nursery is started once per Python process and set of preloaded modules, imports them, stays single
threaded (only then is forking safe), and forks a rank whenever asked. It also is the one place that
knows for certain which rank processes exist: it reaps them, reports how each ended, and kills every
one of them with its descendants when the parent is gone, even when the parent was killed by SIGKILL.
A descendant that has left its rank's process group (``setsid``, a daemon) is caught too, on Linux: each
rank, and the nursery itself, is the "subreaper" of its orphans. What loses its parent becomes the rank's
child; when the rank ends, the nursery's, which ends it.

The standard library's forkserver was not enough: it is one per process, re-imports the caller's main
script in every child, and leaves its children behind when the parent is killed.
"""

import atexit
import contextlib
import ctypes
import gc
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
import time
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module

START_TIMEOUT_S = 120  # importing deepspeed and transformers on a cold disk
END_TIMEOUT_S = 5  # a killed process may still have memory of many gigabytes to give back
PR_SET_CHILD_SUBREAPER = 36
#: One thread each while the libraries load, and in the ranks: a nursery with threads could not be forked safely.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a preloaded module asks for GPUs: without starting CUDA, or forks lose it
}
#: Modules that every rank needs.
ALWAYS = (
    "numpy.random",
    "torch",
    "torch.distributed",
    "cloudpickle",
    "pardemo.rank",
    "pardemo.collectives",
    "pardemo.meters",
)


class Nursery:
    """The parent's handle on a nursery process. Thread-safe: each request waits for its reply."""

    def __init__(self, preload: Sequence[str]):
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._exits: dict[int, int] = {}
        self._socket, theirs = socket.socketpair()
        self.folder = tempfile.mkdtemp(prefix="pardemo-")  # the nursery removes it, even when this process is killed
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others, too
        settings = json.dumps({"fd": theirs.fileno(), "path": path, "preload": list(preload), "folder": self.folder})
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from pardemo.nursery import _serve; import sys; _serve(sys.argv[1])", settings],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={"TOKENIZERS_PARALLELISM": "false", **os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
        )
        theirs.close()
        self._buffer = b""
        self._broken = False
        self._ready = False

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

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL for those ranks and all their descendants in the same process group."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps({"do": "kill", "pids": list(pids)}).encode() + b"\n")

    def wait_exit(self, pid: int, timeout_s: float) -> int | None:
        """How a rank ended: its exit code, negative for a signal; None if it has not ended in that time."""
        with self._lock:
            try:
                self._read(lambda _: pid in self._exits, timeout_s)
            except (OSError, RuntimeError):
                return None
            return self._exits.pop(pid)

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        self._socket.close()  # the nursery sees it, kills its ranks and ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
            return
        self._process.kill()
        self._process.wait()

    def _wait_ready(self) -> None:
        if not self._ready:
            self._read(lambda message: "ready" in message, START_TIMEOUT_S)
            self._ready = True

    def _read(self, wanted: Callable[[dict], bool], timeout_s: float) -> dict:
        """Reads messages until ``wanted`` says so; keeps notices of ended ranks on the way."""
        message: dict = {}
        deadline = time.monotonic() + timeout_s
        while not wanted(message):
            while b"\n" not in self._buffer:
                if not readable(self._socket.fileno(), deadline - time.monotonic()):
                    raise RuntimeError(f"the process that ranks start from did not answer within {timeout_s:g} s")
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


_nurseries: dict[tuple[str, ...], Nursery] = {}
_nurseries_lock = threading.Lock()


def nursery(preload: Sequence[str] = ()) -> Nursery:
    """The warm process with these modules loaded; started on first use, shared by all Worlds of this process."""
    key = (*ALWAYS, *sorted(set(preload)))
    with _nurseries_lock:
        found = _nurseries.get(key)
        if found is None or not found.alive:
            found = _nurseries[key] = Nursery(key)
        return found


def readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Whether there is something to read (the end of file, too). For any descriptor: select() ends at 1,024."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def _let_go_after_fork() -> None:
    """A fork of the notebook's process must not hold the line that tells the nursery its parent is gone."""
    for one in _nurseries.values():
        one._socket.close()


os.register_at_fork(after_in_child=_let_go_after_fork)


@atexit.register
def _close_all() -> None:
    for one in _nurseries.values():
        one.close()


# ---------------------------------------------------------------- the nursery's own side


def _serve(settings_json: str) -> None:
    """The nursery process: preload, then fork, reap and kill on request until the parent is gone."""
    settings = json.loads(settings_json)
    control = socket.socket(fileno=settings["fd"])
    os.set_inheritable(control.fileno(), False)
    sys.path[:] = settings["path"]

    def say(**message):
        with contextlib.suppress(OSError):  # the parent may be gone; the main loop will notice
            control.sendall(json.dumps(message).encode() + b"\n")

    for name in settings["preload"]:
        try:
            import_module(name)
        except Exception as error:  # whatever a module raises at import is the caller's to read
            say(error=f"cannot preload {name!r}: {error}")
            shutil.rmtree(settings["folder"], ignore_errors=True)
            return
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch's 130 operator libraries would be taken down in every rank, 25 ms each time
    gc.collect()
    gc.freeze()  # the ranks' collector need not walk what the libraries made: 0.3 s a time, and it keeps pages shared
    say(ready=True)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w)
    _adopt_orphans()
    helpers = frozenset(_own_children())  # of a preloaded module, as multiprocessing's resource tracker
    children: set[int] = set()
    poller = select.poll()
    for fd in (control.fileno(), wake_r):
        poller.register(fd, select.POLLIN)
    buffer, fds = b"", []
    while True:
        for ready, _ in poller.poll():
            if ready == wake_r:
                os.read(wake_r, 4096)
                for pid, code in _reap(children):
                    say(exited=pid, code=code)
                _end_orphans(children | helpers)
                continue
            try:
                data, new_fds, _, _ = socket.recv_fds(control, 65536, 64)
            except ConnectionResetError:  # the parent ended with messages of ours unread
                data, new_fds = b"", []
            fds += new_fds
            if not data:
                _kill_all(children, helpers)
                shutil.rmtree(settings["folder"], ignore_errors=True)
                os._exit(0)
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for request in map(json.loads, lines):
                if request["do"] == "kill":
                    for pid in children.intersection(request["pids"]):
                        _kill_group(pid)
                else:
                    mine, fds = fds[:4], fds[4:]
                    pid = _fork_rank(mine, close=[control.fileno(), wake_r, wake_w])
                    children.add(pid)
                    for fd in mine:
                        os.close(fd)
                    say(pid=pid)


def _adopt_orphans() -> None:
    """A descendant whose parent ends becomes this process's child, not init's (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _fork_rank(fds: list[int], close: list[int]) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # both sides do it, so that it holds whoever runs first
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in close:
            os.close(fd)
        _adopt_orphans()
        from pardemo.rank import main

        main(*fds)
        status = 0
    except BaseException:  # a forked child must never return into the nursery's loop
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _reap(children: set[int]) -> list[tuple[int, int]]:
    """Collects ended ranks. Their process groups are killed while the zombie still holds the number."""
    ended = []
    for pid in sorted(children):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _kill_group(pid)
        ended.append((pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        children.discard(pid)
    return ended


def _end_orphans(known: set[int]) -> None:
    """Kills what ended ranks have left behind. Each that ends hands on its own children, and wakes us for them."""
    for pid in set(_own_children()) - known:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)


def _kill_all(ranks: set[int], helpers: frozenset[int]) -> None:
    """Ends all ranks and their descendants: what a dying process hands on is ours before it can be reaped."""
    for pid in ranks:
        _kill_group(pid)
    until = time.monotonic() + END_TIMEOUT_S
    while set(_own_children()) - helpers and time.monotonic() < until:
        _reap(ranks)
        _end_orphans(ranks | helpers)
        time.sleep(0.005)


def _own_children() -> list[int]:
    """Pids of this process's children, adopted ones too; none where the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as stream:
            return [int(pid) for pid in stream.read().split()]
    except OSError:
        return []


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
