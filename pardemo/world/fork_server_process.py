"""Runs in the fork server: preloads modules, forks ranks, reaps them, and kills them when its parent is gone.

A descendant that has left its rank's process group (``setsid``, a daemon) is caught too, on Linux: each
rank, and the fork server itself, is the "subreaper" of its orphans. What loses its parent becomes the rank's
child; when the rank ends, the fork server's, which ends it.
"""

import contextlib
import ctypes
import functools
import gc
import json
import os
import pkgutil
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from pardemo import compat
from pardemo.termination import end_with_parent
from pardemo.world import fork_server
from pardemo.world.imports import without_garbage_collection

END_TIMEOUT_S = 5  # a killed process may still have memory of many gigabytes to give back
PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """What a library says as it is imported goes to the error stream: the output is the program's."""
    if sys.stdout is None:  # this process was started without one
        yield
        return
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


def serve(settings_json: str) -> None:
    """Runs the fork server: preloads, then forks, reaps and kills on request until the parent is gone."""
    settings = json.loads(settings_json)
    control = socket.socket(fileno=settings["fd"])
    os.set_inheritable(control.fileno(), False)
    sys.path[:] = settings["path"]
    fork_server.inherited_folder = settings["folder"]

    def say(**message):
        with contextlib.suppress(OSError):  # the parent may be gone; the main loop will notice
            control.sendall(json.dumps(message).encode() + b"\n")

    calls = [name for name in settings["preload"] if ":" in name]
    for name in [*(name for name in settings["preload"] if ":" not in name), *calls]:
        try:
            with without_garbage_collection(), _no_output():
                pkgutil.resolve_name(name)() if name in calls else import_module(name)
        except Exception as error:  # whatever a module raises at import is the caller's to read
            say(error=f"cannot preload {name!r}: {error}")
            shutil.rmtree(settings["folder"], ignore_errors=True)
            return
    for finalizer in list(compat.finalizers):
        finalizer.atexit = False  # torch's 130 operator libraries would be taken down in every rank, 25 ms each time
    gc.collect()
    gc.freeze()  # the ranks' collector need not walk what the libraries made: 0.3 s a time, and it keeps pages shared
    say(ready=True)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w)
    become_subreaper()
    helpers = frozenset(_own_children())  # of a preloaded module, as multiprocessing's resource tracker
    children: set[int] = set()
    servers: set[int] = set()
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
                _reap(servers)
                _end_orphans(children | servers | helpers)
                continue
            try:
                data, new_fds, _, _ = socket.recv_fds(control, 65536, 64)
            except ConnectionResetError:  # the parent ended with messages of ours unread
                data, new_fds = b"", []
            fds += new_fds
            if not data:
                _kill_all(children, helpers | servers)  # those end by themselves, when their own line does
                shutil.rmtree(settings["folder"], ignore_errors=True)
                os._exit(0)
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for request in map(json.loads, lines):
                if request["do"] == "kill":
                    for pid in children.intersection(request["pids"]):
                        _kill_group(pid)
                    continue
                descriptors = [control.fileno(), wake_r, wake_w]
                if request["do"] == "fork":
                    mine, fds = fds[:4], fds[4:]
                    pid = _fork(descriptors, functools.partial(_rank, os.getpid(), settings["main"], mine))
                    with contextlib.suppress(OSError):  # both sides do it, so that it holds whoever runs first
                        os.setpgid(pid, pid)
                    children.add(pid)
                    say(pid=pid)
                else:
                    mine, fds = fds[:1], fds[1:]
                    pid = _fork(descriptors, functools.partial(_child_server, request, mine[0]))
                    servers.add(pid)
                    say(server=request["number"], pid_of_server=pid)
                for fd in mine:
                    os.close(fd)


def become_subreaper() -> None:
    """Makes descendants whose parent ends this process's children, not init's (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _fork(descriptors: list[int], run: Callable[[], None]) -> int:
    """Forks a child that calls ``run`` without this process's descriptors and signals, and ends; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in descriptors:
            os.close(fd)
        run()
        status = 0
    except BaseException:  # a forked child must never return into the server's loop
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _rank(parent: int, main: str, fds: list[int]) -> None:
    end_with_parent(parent)
    os.setpgid(0, 0)
    become_subreaper()
    pkgutil.resolve_name(main)(*fds)


def _child_server(request: dict[str, Any], fd: int) -> None:
    """Runs another fork server, which has loaded what this one has."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    serve(json.dumps(request["settings"] | {"fd": fd}))


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
