"""Kernels for a run of the collection, forked from a process that has loaded what its notebooks load.

The kernels would import torch, pandas and Matplotlib one after the other, and so would the processes that their ranks
are forked from: six seconds a notebook in which nothing is measured. Notebooks that compare with other libraries get
kernels from a second process, which has loaded these, too: the others' ranks stay without them. Where processes cannot
be forked so (other systems than Linux) kernels start as Jupyter starts them.
"""

import contextlib
import json
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pardemo import compat, project
from pardemo.book.run import fingerprint
from pardemo.draw import pictures
from pardemo.world import fork_server

#: What most notebooks import. It is loaded once; a notebook that wants more loads that itself.
LOADED = (
    "ipykernel.kernelapp",
    "ipykernel.zmqshell",
    "pandas",
    "matplotlib.pyplot",
    "matplotlib_inline.backend_inline",
    "pardemo.cells.magic",
    "pardemo.draw.charts",
    "pardemo.draw.player",
    "pardemo.book.page",
)
#: What several notebooks load in ranks, or in the kernel, and few could do without: seconds each.
LIBRARIES = (
    "pardemo.finetune.predict",
    "pardemo.finetune.train",
    "pardemo.peers.accelerate.ranks",
    "pardemo.peers.deepspeed.engine",
    "pardemo.peers.deepspeed.pipeline",
    "pardemo.peers.deepspeed.ulysses",
    "pardemo.peers.megatron",
    "pardemo.peers.megatron_context",
    "pardemo.peers.megatron_experts",
    "pardemo.peers.pytorch.dtensor",
    "pardemo.peers.pytorch.fsdp",
    "pardemo.peers.pytorch.pipelining",
    "pardemo.planner.models",
)
FEWEST = 3  # notebooks that name some of these, for which it pays to load all of them
MAIN = "pardemo.book.run.kernels:main"
CONTROL_ENDS_WITHIN_S = 5.0


@contextlib.contextmanager
def warm(notebooks: Mapping[str, Path]) -> Iterator[bool]:
    """Within the block kernels are forked from a warm process, which loads its libraries meanwhile."""
    if sys.platform == "linux":
        _fork_server(LOADED)
        from jupyter_client.provisioning import local_provisioner

        with compat.replaced(local_provisioner, "launch_kernel", partial(_launch, with_libraries(notebooks))):
            yield True
    else:
        yield True


@contextlib.contextmanager
def none_left() -> Iterator[list[Any]]:
    """Behind the block no kernel that began within it is left: of one that was interrupted in its start nobody knows.

    Alone it would write its connection file once more, into a folder that has been removed meanwhile. The list has
    the processes of the kernels, as they begin.
    """
    from jupyter_client.provisioning import local_provisioner

    launch, begun = local_provisioner.launch_kernel, []

    def noted(*arguments: Any, **options: Any) -> Any:
        begun.append(launch(*arguments, **options))
        return begun[-1]

    try:
        with compat.replaced(local_provisioner, "launch_kernel", noted):
            yield begun
    finally:
        for kernel in begun:
            if kernel.poll() is None:
                kernel.kill()
                kernel.wait()


def with_libraries(notebooks: Mapping[str, Path]) -> frozenset[str]:
    """Names those notebooks whose kernels have loaded :data:`LIBRARIES`; none where they would be too few."""
    naming = [name for name, path in notebooks.items() if fingerprint.named(path) & {*LIBRARIES}]
    return frozenset(naming if len(naming) >= FEWEST else ())


def _fork_server(loaded: Sequence[str]) -> fork_server.ForkServer:
    with project.environment({"MPLBACKEND": "module://matplotlib_inline.backend_inline"}):
        return fork_server.shared(loaded, MAIN)


def _launch(
    with_libraries: frozenset[str], cmd: Sequence[str], env: dict[str, str], cwd: str | None = None, **unused: Any
) -> fork_server.Forked:
    """In place of jupyter_client's: here, too, the process has a group of its own."""
    ours, theirs = socket.socketpair()
    with open(os.devnull, "rb") as nothing, Connection(ours.detach()) as control, theirs:
        fds = [theirs.fileno(), 1, 2, nothing.fileno()]
        pids: list[int] = []
        if env.get(pictures.NOTEBOOK) in with_libraries:
            with contextlib.suppress(ImportError):  # one is not installed here, which a cell may tell
                pids = _fork_server((*LOADED, *LIBRARIES)).fork([fds])
        (pid,) = pids or _fork_server(LOADED).fork([fds])
        settings = {"env": dict(env), "path": sys.path, "cwd": cwd or os.getcwd(), "argv": cmd[cmd.index("-f") :]}
        control.send_bytes(json.dumps(settings).encode())
        return fork_server.Forked(pid)


def main(control_fd: int, stdout_fd: int, stderr_fd: int, stdin_fd: int) -> None:
    """The life of a kernel, in the forked process."""
    from ipykernel import kernelapp

    for number, fd in enumerate((stdin_fd, stdout_fd, stderr_fd)):
        os.dup2(fd, number)
        os.close(fd)
    with Connection(control_fd) as control:
        settings = json.loads(control.recv_bytes())
    os.environ.clear()
    os.environ.update(settings["env"], JPY_PARENT_PID=str(os.getppid()))
    os.chdir(settings["cwd"])
    sys.path[:] = settings["path"]
    fork_server.fork_here()
    _as_a_new_process()
    # an interrupt that comes before the end of each kernel is no error to tell; a cell's are in the notebook
    quiet = [f"--IPKernelApp.parent_handle={os.getppid()}", "--IPKernelApp.log_level=CRITICAL"]
    kernelapp.launch_new_instance(argv=[*settings["argv"], *quiet])
    _end(kernelapp.IPKernelApp.instance())


def _as_a_new_process() -> None:
    """Other random numbers than another kernel's, and torch's own number of threads."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


def _end(kernel: Any) -> None:
    """What the interpreter does at its end: the process itself ends by ``os._exit``.

    The thread that took the request to end flushes what was printed, through a thread that the exit functions stop. If
    that is gone first it waits ten seconds, and Jupyter sends SIGTERM after two and a half. So it ends before them.
    """
    kernel.control_thread.stop()
    kernel.control_thread.join(CONTROL_ENDS_WITHIN_S)
    compat.end_threads()
    compat.run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
