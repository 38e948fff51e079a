"""What a scene has left behind: processes, temporary files, shared memory, network interfaces and namespaces."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import psutil

from pardemo.cluster.keeper import ADAPTER
from pardemo.deadline import Deadline
from pardemo.soak.sockets import open_sockets

SHARED_MEMORY = Path("/dev/shm")
INTERFACES = Path("/sys/class/net")
NAMED_NAMESPACES = Path("/run/netns")
#: Names that :mod:`pardemo.cluster.keeper` gives: others, as those of containers, come and go.
OURS = rf"switch|port\d+|{ADAPTER}"
#: How long what was ended may take to be gone: a killed process has memory to give back, a keeper looks twice a second.
GONE_WITHIN_S = 15.0


def descendants(known: Collection[int] = ()) -> list[psutil.Process]:
    """The processes below this one that run, but for those ``known``; what has ended and waits to be collected is none.

    Where this process is the subreaper of what it starts, a process whose parent has ended is still below it.
    """
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in known and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


class Left(NamedTuple):
    """What is left and is no process, a line for each: ``sockets``; network ``namespaces``, and interfaces, of which
    one is on the machine only where its namespace is; temporary ``folders`` and files, shared memory among them."""

    sockets: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(self[:])


def held_by(processes: Collection[psutil.Process]) -> Left:
    """The sockets and the network namespaces that processes which were left keep alive."""
    sockets, namespaces, own = {}, {}, _namespace(os.getpid())
    for process in processes:
        for number, words in open_sockets(process.pid).items():
            sockets[number] = f"{words} of process {process.pid}"
        if (namespace := _namespace(process.pid)) not in (None, own):
            namespaces[namespace] = f"network namespace of process {process.pid}"
    return Left(tuple(sockets.values()), tuple(namespaces.values()))


def line_of(process: psutil.Process) -> str:
    """A process in words: its number, its command, and whether it lies in a network namespace of its own."""
    try:
        command = " ".join(process.cmdline())[:80] or process.name()
    except psutil.Error:
        command = "(it has ended meanwhile)"
    own = " in another network namespace" if _namespace(process.pid) not in (None, _namespace(os.getpid())) else ""
    return f"process {process.pid}{own}: {command}"


def _namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


class Before:
    """What there was before a scene, so that :meth:`leaked` tells what there is more afterwards.

    Args:
        temporary: the scene's own folder of temporary files, which is empty at its begin.
        stays: patterns of those that cannot but stay.
    """

    def __init__(self, temporary: Path, stays: Collection[str] = ()):
        self._temporary, self._stays = temporary, stays
        self._interfaces, self._named = _names(INTERFACES), _names(NAMED_NAMESPACES)
        self._shared = _names(SHARED_MEMORY)
        self._pids: set[int] = set()

    def see(self, pids: Collection[int]) -> None:
        """Notes processes of the scene: what has one of these numbers in its name is the scene's."""
        self._pids.update(pids)

    def leaked(self, is_over: Callable[[], bool] = lambda: False) -> Left:
        """What is left and is no process, once what is being ended had its time, or is over."""
        limit = Deadline(GONE_WITHIN_S, [os.getpid()])
        while (left := self._left()) and limit.left_s() and not is_over():
            time.sleep(0.05)
        return left

    def _left(self) -> Left:
        sockets, folders = [], []
        for path in sorted(self._temporary.iterdir()):
            if path.is_socket():
                sockets.append(f"unix socket {path.name}")
            elif not any(path.match(pattern) for pattern in self._stays):
                folders.append(f"temporary file {path.name}")
        shared = sorted(_names(SHARED_MEMORY) - self._shared)
        folders += [f"shared memory {name}" for name in shared if self._is_ours(name)]
        links = sorted(_names(INTERFACES) - self._interfaces)
        namespaces = [f"network interface {name}" for name in links if re.fullmatch(OURS, name)]
        named = sorted(_names(NAMED_NAMESPACES) - self._named)
        namespaces += [f"network namespace {name}" for name in named if self._is_ours(name)]
        return Left(tuple(sockets), tuple(namespaces), tuple(folders))

    def _is_ours(self, name: str) -> bool:
        """Others use the machine, too, as another soak: what is ours carries the number of one of our processes."""
        return any(int(number) in self._pids for number in re.findall(r"\d+", name))


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()
