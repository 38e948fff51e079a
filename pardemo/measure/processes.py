"""What a script does about its processes and where they meet: spawns them itself, makes stores of its own, exits."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from pardemo import compat
from pardemo.measure import stand_ins


class Exited(RuntimeError):
    """The script ended a rank with a status of failure."""


class OwnProcesses(RuntimeError):
    """The script starts its ranks itself, and not as many as there are."""


@contextlib.contextmanager
def spawned_here(rank: int, beside: int, notes: list[str]) -> Iterator[None]:
    """Within the block ``torch.multiprocessing.spawn`` calls its function here, for this rank alone.

    The scripts of the other ranks come to the same line.

    ``rank``: on its host, of as many as ``beside``. A rank with a process group spawns what it likes.

    Raises:
        OwnProcesses: the script spawns another number of processes than there are ranks.
    """
    real, process = torch.multiprocessing.spawn, os.getpid()

    def spawn(
        fn: Callable, args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:  # fmt: skip
        if dist.is_initialized() or os.getpid() != process:
            return real(fn, args, nprocs, join, daemon, start_method)
        if nprocs != beside:
            raise OwnProcesses(
                f"the script starts {nprocs} processes by torch.multiprocessing.spawn, and the ranks are {beside}: "
                f"measure with --ranks {nprocs}"
            )
        line = "torch.multiprocessing.spawn → its function runs on each rank, which is there already"
        if line not in notes:
            notes.append(line)
        fn(rank, *args)
        return None if join else _Over()

    with stand_ins.replaced_everywhere([(real, spawn)]):
        yield


class _Over:
    """The context that ``spawn(join=False)`` returns, of processes that have ended."""

    processes: Sequence[Any] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


@contextlib.contextmanager
def ports_of_stores(ports: set[int]) -> Iterator[None]:
    """Within the block the port of each TCPStore that is made is added to ``ports``."""
    begin = dist.TCPStore.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        ports.add(self.port)

    with compat.replaced(dist.TCPStore, "__init__", made):
        yield


def exited(code: Any) -> Exited:
    """What ``sys.exit(code)`` says of a failure; a text is printed, as Python does it."""
    if isinstance(code, int):
        return Exited(f"exit status {code}")
    print(code, file=sys.stderr)
    return Exited(f"sys.exit: {code}")
