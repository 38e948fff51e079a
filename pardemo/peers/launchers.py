"""The same experiment function as ranks of torchrun: one agent per host, here several agents on this one."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

from pardemo import project
from pardemo.cluster import loopback
from pardemo.deadline import Deadline
from pardemo.world.errors import RankError


def under_agents(function: str, agents: int = 2, ranks_each: int = 1) -> Any:
    """Runs ``MODULE:FUNCTION`` under ``agents`` torchrun agents that meet over loopback; rank 0's result.

    Raises:
        RankError: see :func:`run_agents`.
    """
    output = run_agents(["-m", "pardemo.world", function], agents, ranks_each)
    return json.loads(output[0].strip().splitlines()[-1])


def run_agents(command: Sequence[str], agents: int = 2, ranks_each: int = 1, timeout_s: float = 120.0) -> list[str]:
    """Runs a script or ``-m MODULE``, with its arguments, under torchrun agents; what each of them printed.

    Each agent believes itself a host of its own, as ``torchrun --nnodes`` does on real hosts.

    Raises:
        RankError: an agent failed or did not end in time; its last lines are in the message. No process is left.
    """
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(agents), "--nproc-per-node",
             str(ranks_each), "--master-addr", "127.0.0.1", "--master-port", str(loopback.free_port())]  # fmt: skip
    jobs = {f"torchrun agent {n}": [*agent, "--node-rank", str(n), *command] for n in range(agents)}
    return together(jobs, timeout_s)


def together(jobs: Mapping[str, Sequence[str] | str], timeout_s: float, folder: Path | None = None) -> list[str]:
    """Runs commands that wait for each other, each with the name to tell it by; what each of them printed.

    A text is a shell's, a list is none. When one fails, the others are ended: they would wait for it for minutes.

    Raises:
        RankError: a command failed or did not end in time; its last lines are in the message. No process is left.
    """
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(project.PACKAGE.parent), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # the hosts are on this one
    }
    with contextlib.ExitStack() as stack:
        # files: a process that others wait for must not be held up by a full pipe that nobody reads
        printed, errors = ([stack.enter_context(tempfile.TemporaryFile("w+")) for _ in jobs] for _ in range(2))
        started: list[subprocess.Popen] = []
        try:
            for command, out, err in zip(jobs.values(), printed, errors, strict=True):
                shell = isinstance(command, str)
                started.append(
                    subprocess.Popen(command, shell=shell, cwd=folder, env=environment, stdout=out, stderr=err)
                )
            limit = Deadline(timeout_s, [process.pid for process in started])
            statuses = _wait(started, limit)
        finally:
            for process in started:
                end(process)
        # a job that failed comes before those that were ended for it
        for name, status, file in sorted(zip(jobs, statuses, errors, strict=True), key=lambda job: not job[1]):
            if status != 0:
                ending = f"did not end within {limit}" if status is None else f"ended with status {status}"
                raise RankError("\n".join([f"{name} {ending}:", *_text(file).strip().splitlines()[-60:]]))
        return [_text(file) for file in printed]


def end(process: subprocess.Popen) -> None:
    """Ends a process that we started, where it still runs, and all that it started (torchrun's ranks lead sessions)."""
    if process.poll() is None:
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        process.kill()
        process.wait()


def _wait(started: Sequence[subprocess.Popen], limit: Deadline) -> list[int | None]:
    """The exit statuses once all have ended, one has failed, or the time is over: None for those still at work."""
    while True:
        statuses = [process.poll() for process in started]
        if None not in statuses or any(statuses) or not limit.left_s():
            return statuses
        time.sleep(0.05)


def _text(file: TextIO) -> str:
    file.seek(0)
    return file.read()
