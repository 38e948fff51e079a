"""What a script does about its processes and where they meet: spawns them itself, makes stores of its own, exits."""

import contextlib
import multiprocessing.process
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from pardemo import compat
from pardemo.measure import stand_ins
from pardemo.measure.libraries import is_script

#: Programs that may run a script of their own.
_MAY_TRAIN = re.compile(r"python[\d.]*$|torchrun$|accelerate$|deepspeed$|mpirun$|srun$")


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


@contextlib.contextmanager
def started(commands: list[str]) -> Iterator[None]:
    """Within the block what the script starts as processes that may train is added to ``commands``.

    Programs of Python and launchers by their command lines, functions by their names; no workers of a DataLoader.
    """
    begin, start = subprocess.Popen.__init__, multiprocessing.process.BaseProcess.start

    def popen(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        words = args.split() if isinstance(args, str) else [str(word) for word in args]
        if words and _MAY_TRAIN.match(os.path.basename(words[0])):
            commands.append(" ".join([os.path.basename(words[0]), *words[1:]]))
        begin(self, args, *rest, **options)

    def start_process(self: Any) -> None:
        function = getattr(self, "_target", None)
        if function is not None and is_script(function.__code__.co_filename if hasattr(function, "__code__") else "<"):
            commands.append(f"{function.__name__}()")
        start(self)

    with (
        compat.replaced(subprocess.Popen, "__init__", popen),
        compat.replaced(multiprocessing.process.BaseProcess, "start", start_process),
    ):
        yield


def exited(exit_: SystemExit) -> Exited:
    """What ``sys.exit()`` says of a failure, and where; a text is printed, as Python does it."""
    own = [frame for frame in traceback.extract_tb(exit_.__traceback__) if is_script(frame.filename)]
    where = f", at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    if isinstance(exit_.code, int):
        return Exited(f"exit status {exit_.code}{where}")
    print(exit_.code, file=sys.stderr)
    return Exited(f"sys.exit: {exit_.code}{where}")
