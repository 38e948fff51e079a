"""The sockets that a process has open and that others can meet: TCP listeners and connections, abstract unix sockets.

A pair of sockets without a name, as between a process and those that it starts, is none of them.
"""

import contextlib
import gc
import os
import re
import time
from collections.abc import Collection
from pathlib import Path

from pardemo.deadline import Deadline

LISTENS = "0A"  # the state of a TCP socket in the kernel's tables
#: How long what was closed may take to be gone: a thread of a library may still hold it.
CLOSED_WITHIN_S = 5.0


def open_sockets(pid: int) -> dict[int, str]:
    """The process's sockets in words, by the kernel's number of each; of a process that has ended, none.

    They are read from the tables of the process's own network namespace, and are those that it has a descriptor of:
    what other programs of the machine have open is none of them.
    """
    process = Path("/proc", str(pid))
    own = _numbers(process / "fd")
    found = {}
    for table in ("tcp", "tcp6"):
        for line in _lines(process / "net" / table):
            fields = line.split()
            number, here, there = int(fields[9]), *(int(fields[i].rpartition(":")[2], 16) for i in (1, 2))
            if number in own:
                found[number] = (
                    f"TCP listener on port {here}" if fields[3] == LISTENS else f"TCP connection {here} to {there}"
                )
    for line in _lines(process / "net" / "unix"):
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7].startswith("@") and int(fields[6]) in own:
            found[int(fields[6])] = f"abstract unix socket {fields[7]}"
    return found


def left_open(before: Collection[int]) -> list[str]:
    """This process's sockets in words, but for those ``before``, that stay open once what closes them had its time."""
    gc.collect()  # what only a cycle of objects still holds
    limit = Deadline(CLOSED_WITHIN_S, [os.getpid()])
    while True:
        left = [words for number, words in open_sockets(os.getpid()).items() if number not in before]
        if not left or not limit.left_s():
            return left
        time.sleep(0.02)


def _numbers(folder: Path) -> set[int]:
    numbers = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(folder / name)):
                    numbers.add(int(match[1]))
    return numbers


def _lines(table: Path) -> list[str]:
    """The lines of one of the kernel's tables, without its heading."""
    try:
        return table.read_text(errors="replace").splitlines()[1:]
    except OSError:  # the process has ended, or the kernel has no such table, as without IPv6
        return []
