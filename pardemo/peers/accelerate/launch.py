"""The launch commands of a configuration, written beside it, and proven by running exactly what was written.

Three launchers start the same script: ``accelerate launch`` reads the configuration itself; torchrun and ``deepspeed``
know nothing of it, so what it says reaches the ranks as variables from a file of their own.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.cluster import loopback
from pardemo.peers import launchers
from pardemo.peers.accelerate import config_checks

SCRIPTS = Path(__file__).with_name("scripts")  # not imported: that takes seconds, and only files are copied here
PLAIN, SCRIPT = "train_plain.py", "train_accelerate.py"
LAUNCHERS = ("accelerate", "torchrun", "deepspeed")


def write_scripts(folder: Path) -> None:
    """Copies of the plain script and of Accelerate's into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (SCRIPTS / PLAIN, SCRIPTS / SCRIPT):
        project.write_atomically(folder / source.name, partial(shutil.copy, source))


def commands(config: Path, launcher: str = "accelerate", arguments: Sequence[str] = ()) -> list[str]:
    """The shell commands, one per host, that start the script in the configuration's folder.

    For ``torchrun`` and ``deepspeed`` the variables that ``accelerate launch`` would set are written to a file beside
    the configuration, ``NAME.env``.

    Raises:
        ValueError: no such launcher, or what ``config_checks.read`` says.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"no launcher {launcher!r}; there are: {', '.join(LAUNCHERS)}")
    settings = config_checks.read_config(config)
    processes, hosts = settings.get("num_processes", 1), settings.get("num_machines", 1)  # as Accelerate has them
    script, port = " ".join([SCRIPT, *arguments]), loopback.free_port()
    if launcher == "accelerate":
        start = f"accelerate launch --config_file {config.name} --main_process_port {port}"
        return [f"{start} {script}"] if hosts == 1 else [f"{start} --machine_rank {n} {script}" for n in range(hosts)]
    with_variables = f"env $(cat {_write_variables(config)})"
    if launcher == "deepspeed":
        if hosts > 1:
            raise ValueError("deepspeed reaches other hosts through ssh: not here; use accelerate or torchrun")
        return [f"{with_variables} deepspeed --num_gpus {processes} --master_port {port} --no_local_rank {script}"]
    start = f"{with_variables} torchrun --nproc-per-node {processes // hosts} --master-port {port}"
    if hosts == 1:
        return [f"{start} {script}"]
    meet = f"--nnodes {hosts} --master-addr {settings['main_process_ip']}"
    return [f"{start} {meet} --node-rank {host} {script}" for host in range(hosts)]


def run(
    jobs: Mapping[str, Sequence[str]], folder: Path, at_once: int = 2, timeout_s: float = 180.0
) -> dict[str, list[dict[str, Any]]]:
    """Runs jobs, each a list of one command per host, in ``folder``; what each of a job's ranks printed last, as JSON.

    Raises:
        RankError: a command failed or did not end in time; nothing of its job is left running.
    """
    with ThreadPoolExecutor(at_once) as pool:
        endings = pool.map(lambda name: _job(name, jobs[name], folder, timeout_s), jobs)
        return dict(zip(jobs, endings, strict=True))


def write_commands(folder: Path, jobs: Mapping[str, Sequence[str]]) -> Path:
    """``folder/commands.txt``: every job's commands under its name, to be run in that folder."""
    lines = [line for name, texts in jobs.items() for line in (f"# {name}", *texts, "")]
    path = folder / "commands.txt"
    project.write_text(path, "\n".join(lines))
    return path


def _write_variables(config: Path) -> str:
    beside = f"{config.parent}{os.sep}"
    variables = {
        name: value.replace(beside, "")
        for name, value in config_checks.environment(config).items()
        if not name.startswith("ACCELERATE_DYNAMO")  # torch.compile's, at their defaults
    }
    text = "".join(f"{name}={value}\n" for name, value in variables.items() if value)
    path = config.with_suffix(".env")
    project.write_text(path, text)
    return path.name


def _job(name: str, texts: Sequence[str], folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    names = [name] if len(texts) == 1 else [f"{name}, host {n}" for n in range(len(texts))]
    printed = launchers.together(dict(zip(names, texts, strict=True)), timeout_s, folder)
    return [outcome for text in printed for outcome in _outcomes(text)]


def _outcomes(printed: str) -> list[dict[str, Any]]:
    """What the ranks printed as JSON; their lines may run into one another."""
    begins = [match.start() for match in re.finditer('{"losses"', printed)]
    return [json.JSONDecoder().raw_decode(printed, begin)[0] for begin in begins]
