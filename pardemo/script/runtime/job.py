"""Runs a script on a rank as a process of its launcher's job, with the variables that it expects."""

import contextlib
import importlib.util
import multiprocessing.process
import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from pardemo import compat
from pardemo.cluster import loopback
from pardemo.script.runtime import libraries, stand_ins
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.runtime.libraries import is_script, note_once, script_line
from pardemo.script.runtime.steps import Enough
from pardemo.script.runtime.without_gpu import teach_dtensor, without_gpu
from pardemo.script.words import at_line


def set_environment(launch: Launch, rank: int, size: int, port: int) -> None:
    """Sets a launcher's variables for a process of a job on one host or a cluster, and removes the World's own.

    ``port``: where the ranks meet, whatever the line or the script's surroundings say.
    """
    local, local_size = os.environ["LOCAL_RANK"], int(os.environ.get("LOCAL_WORLD_SIZE", size))
    os.environ.update(launch.environment)
    for entry in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if entry and entry not in sys.path:  # this process began before the launcher said it
            sys.path.insert(0, entry)
    of_rank = {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": local, "LOCAL_SIZE": str(local_size),
        "MASTER_ADDR": os.environ["MASTER_ADDR"], "MASTER_PORT": str(port),
    }  # fmt: skip
    torchruns = {
        "GROUP_RANK": str(rank // local_size), "GROUP_WORLD_SIZE": str(-(-size // local_size)),
        "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(size), "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "pardemo-measure", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    for name in of_rank | torchruns:
        os.environ.pop(name, None)
    os.environ.update({"torchrun": of_rank | torchruns, "deepspeed": of_rank, "": {}}[launch.sets])
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)  # of every launcher: as many GPUs a script is told of


#: Programs that may run a script of their own.
_MAY_TRAIN = re.compile(r"python[\d.]*$|torchrun$|accelerate$|deepspeed$|mpirun$|srun$")


class Exited(RuntimeError):
    """Raised where the script ended a rank with a status of failure."""


class OwnProcesses(RuntimeError):
    """Raised where the script starts its ranks itself, and not as many as there are."""


@contextlib.contextmanager
def spawned_here(rank: int, local_size: int, notes: list[str]) -> Iterator[None]:
    """Within the block ``torch.multiprocessing.spawn`` calls its function here, for this rank alone.

    The scripts of the other ranks come to the same line.

    ``rank``: on its host, of as many as ``local_size``. A rank with a process group spawns what it likes.

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
        if nprocs != local_size:
            raise OwnProcesses(
                f"the script starts {nprocs} processes by torch.multiprocessing.spawn, and the ranks are {local_size}: "
                f"measure with --ranks {nprocs}"
            )
        note_once(notes, "torch.multiprocessing.spawn → its function runs on each rank, which is there already")
        fn(rank, *args)
        return None if join else types.SimpleNamespace(processes=(), join=lambda *_, **__: True)  # they have ended

    with stand_ins.replaced_everywhere([(real, spawn)]):
        yield


@contextlib.contextmanager
def store_ports_noted(ports: set[int]) -> Iterator[None]:
    """Adds the port of each TCPStore that is made within the block to ``ports``."""
    begin = dist.TCPStore.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        ports.add(self.port)

    with compat.replaced(dist.TCPStore, "__init__", made):
        yield


@contextlib.contextmanager
def processes_noted(commands: list[str]) -> Iterator[None]:
    """Adds what the script starts within the block as processes that may train to ``commands``.

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


def in_job(launch: Launch, folder: str, follow: Callable[[int, int, list[str]], Any]) -> Any:
    """Returns what ``follow`` returns on this rank as a process of a job; gives the World's group up for it.

    ``follow`` gets the rank, the port where the ranks meet, and a list for what runs in another way than written.
    """
    rank, size, own_process = dist.get_rank(), dist.get_world_size(), os.getpid()
    port: list[Any] = [loopback.free_port()] if rank == 0 else [None]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    set_environment(launch, rank, size, port[0])
    first = [f"{launch.local_rank}{os.environ['LOCAL_RANK']}"] if launch.local_rank else []
    sys.argv = [launch.script, *first, *launch.arguments]
    sys.path.insert(0, folder if launch.module else os.path.dirname(launch.script))
    os.chdir(folder)
    os.environ.update(libraries.library_environment())
    if not torch.cuda.is_available():
        teach_dtensor()
    notes: list[str] = []
    local, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ["LOCAL_WORLD_SIZE"])
    with libraries.own_folder(_own_folder(launch)), spawned_here(local, local_size, notes), without_gpu(notes):
        seen = follow(rank, port[0], notes)
    if os.getpid() != own_process:  # a child that the script forked, and that came out of the script as well
        os._exit(0)
    return seen


def as_main(launch: Launch) -> str:
    """Runs the script and says how it ended; Exited: with a status of failure, for which other ranks may wait."""
    try:
        if launch.module:
            runpy.run_module(launch.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(launch.script, run_name="__main__")
    except Enough:
        return "enough"
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            status = f"exit status {exit_.code}"
            if not isinstance(exit_.code, int):
                print(exit_.code, file=sys.stderr)  # as Python does it
                status = f"sys.exit: {exit_.code}"
            raise Exited(f"{status}{at_line(script_line(exit_))}") from None
    return "end"


def _own_folder(launch: Launch) -> str:
    """The folder that is the reader's: the script's, or the package's; the working folder where there is no script."""
    if not launch.module:
        return os.path.dirname(launch.script) or os.getcwd()
    spec = importlib.util.find_spec(launch.script.partition(".")[0])
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else ""
