"""What a case leaves behind: processes, sockets, network namespaces, temporary files, shared memory."""

import contextlib
import gc
import os
import re
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from pardemo.deadline import Deadline

COUNTERS = ("orphans", "leaked_sockets", "leaked_namespaces", "leaked_folders")
SHARED_MEMORY = Path("/dev/shm")
#: How long what was ended may take to be gone: a killed process has memory to give back, a cluster's supervisor
#: looks twice a second.
GONE_WITHIN_S = 15.0
#: How long a closed socket may take to be gone: a thread of a library may still hold it.
CLOSED_WITHIN_S = 5.0
LISTENS = "0A"  # the state of a TCP socket in the kernel's tables


class Leftovers:
    """Collects what a case leaves behind, for a process that is the subreaper of all that the case starts.

    Args:
        temporary: the case's own folder of temporary files, empty at its begin. stays: patterns of those that cannot
            but stay. helpers: processes below this one that belong to no case.

    Attributes:
        found: for each of ``COUNTERS`` a line for each thing that is left.
    """

    def __init__(self, temporary: Path, stays: Collection[str], helpers: Collection[int]):
        self.found: dict[str, list[str]] = {name: [] for name in COUNTERS}
        self._temporary, self._stays, self._helpers = temporary, stays, helpers
        self._before = _names(SHARED_MEMORY)
        self._pids: set[int] = set()

    def processes(self) -> list[psutil.Process]:
        """The case's processes that run; a name with one of their numbers in it is the case's from now on."""
        left = running(self._helpers)
        self._pids.update(process.pid for process in left)
        return left

    def end_processes(self) -> None:
        """Kills what still runs once it had its time to end by itself; notes it, and what it holds."""
        limit = Deadline(GONE_WITHIN_S, [os.getpid()])
        while (left := self.processes()) and limit.left_s():
            _reap()
            time.sleep(0.02)
        for process in left:
            self.found["orphans"].append(_line_of(process))
            sockets = open_sockets(process.pid).values()
            self.found["leaked_sockets"] += [f"{words} of process {process.pid}" for words in sockets]
            if _in_another_namespace(process.pid):
                self.found["leaked_namespaces"].append(f"network namespace of process {process.pid}")
        end_all(self._helpers)

    def look(self) -> None:
        """Notes files, sockets' files and shared memory that are left after their time."""
        limit = Deadline(GONE_WITHIN_S, [os.getpid()])
        while (left := list(self._left())) and limit.left_s():
            time.sleep(0.05)
        for counter, line in left:
            self.found[counter].append(line)

    def _left(self) -> Iterator[tuple[str, str]]:
        for path in sorted(self._temporary.iterdir()):
            if path.is_socket():
                yield "leaked_sockets", f"unix socket {path.name}"
            elif not any(path.match(pattern) for pattern in self._stays):
                yield "leaked_folders", f"temporary file {path.name}"
        for name in sorted(_names(SHARED_MEMORY) - self._before):
            if any(int(number) in self._pids for number in re.findall(r"\d+", name)):  # others use the machine, too
                yield "leaked_folders", f"shared memory {name}"


def running(helpers: Collection[int] = ()) -> list[psutil.Process]:
    """The processes below this one that run, but for the ``helpers``, which are pids; zombies do not run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in helpers and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all(helpers: Collection[int]) -> None:
    """Kills everything that runs below this process, but for the ``helpers``."""
    while left := running(helpers):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)
    _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _line_of(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())[:80] or process.name()
    except psutil.Error:
        command = "(it has ended meanwhile)"
    return f"process {process.pid}: {command}"


def _in_another_namespace(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    return False


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def open_sockets(pid: int) -> dict[int, str]:
    """The sockets of a process that others can meet, in words, by the kernel's number of each: TCP listeners and
    connections, abstract unix sockets. Of a process that has ended, none.
    """
    process, own, found = Path("/proc", str(pid)), set(), {}
    with contextlib.suppress(OSError):
        for name in os.listdir(process / "fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                own.update(map(int, re.findall(r"^socket:\[(\d+)\]", os.readlink(process / "fd" / name))))
    for fields in (line.split() for table in ("tcp", "tcp6") for line in _lines(process / "net" / table)):
        here, there = (int(fields[place].rpartition(":")[2], 16) for place in (1, 2))
        listener = fields[3] == LISTENS
        found[int(fields[9])] = f"TCP listener on port {here}" if listener else f"TCP connection {here} to {there}"
    for fields in (line.split(maxsplit=7) for line in _lines(process / "net" / "unix")):
        if fields[7:] and fields[7].startswith("@"):
            found[int(fields[6])] = f"abstract unix socket {fields[7]}"
    return {number: words for number, words in found.items() if number in own}


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text(errors="replace").splitlines()[1:]
    except OSError:  # the process has ended, or the kernel has no such table, as without IPv6
        return []


def left_open(before: Collection[int]) -> list[str]:
    """This process's sockets in words, but for those ``before``, that stay open once what closes them had its time."""
    gc.collect()  # what only a cycle of objects still holds
    limit = Deadline(CLOSED_WITHIN_S, [os.getpid()])
    while True:
        left = [words for number, words in open_sockets(os.getpid()).items() if number not in before]
        if not left or not limit.left_s():
            return left
        time.sleep(0.02)
