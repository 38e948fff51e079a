"""Reads the line that starts a job as its launcher does: the script, its ranks, its environment.

torchrun, ``accelerate launch`` and ``deepspeed`` parse their own lines here, so that an option means what it means to
them; only what they would start is started by pardemo instead. ``python train.py`` is a line, too, and a bare
``train.py`` one whose launcher was left out.
"""

import argparse
import contextlib
import io
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pardemo import project
from pardemo.cluster import MAX_RANKS

#: Ranks where neither the options nor the line say how many.
RANKS = 4
#: Launchers by their module, for ``python -m``.
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
#: Programs that start others, on nodes that only they know.
ELSEWHERE = ("srun", "sbatch", "salloc", "mpirun", "mpiexec", "jsrun", "ray", "horovodrun", "aprun", "pdsh", "ssh")
#: What pardemo sets for each rank itself, whatever a launcher would set: it is where the ranks of this run meet.
PLACE = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"}
#: Options of python that have a value of their own, or begin what is no script.
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True)
class Launch:
    """A script or a module that a launch line starts.

    ``ranks``: how many in all, None where the line does not say; ``hosts``: on how many machines. ``environment``:
    variables that the launcher sets for every rank. ``sets``: whose variables say where a rank is, ``torchrun``'s,
    ``deepspeed``'s, or nobody's (``""``, a single process). ``local_rank``: what the script gets as its first argument,
    with the local rank behind it; empty of launchers that give it none. ``notes``: what a reader should know.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    ranks: int | None = None
    hosts: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    sets: str = "torchrun"
    local_rank: str = ""
    notes: tuple[str, ...] = ()


def read_launch(words: Sequence[str], ranks: int | None = None) -> Launch:
    """Reads what the words of a line start; ``ranks``: how many were asked for beside the line, which counts more.

    Raises:
        ValueError: the line names no script, its launcher would refuse it, or it is a launcher of another kind;
            ModuleNotFoundError: its launcher is not installed.
    """
    given, words = _variables(words)
    if not words:
        raise ValueError(
            "name a script: pardemo measure -- train.py ARGS; or a module: pardemo measure -m package.train"
        )
    with project.environment(given):
        launch = _read(words, ranks)
    environment = {name: value for name, value in {**given, **launch.environment}.items() if name not in PLACE}
    return replace(launch, environment=environment)


def _read(words: Sequence[str], ranks: int | None) -> Launch:
    first, *rest = words
    name = os.path.basename(first)
    if re.fullmatch(r"python[\d.]*", name):
        return _python(rest, ranks)
    if name == "torchrun":
        return _torchrun(rest)
    if name == "accelerate" and rest[:1] == ["launch"]:
        return _accelerate(rest[1:], ranks)
    if name == "accelerate-launch":
        return _accelerate(rest, ranks)
    if name == "accelerate" and rest[:1] != ["launch"]:
        raise ValueError("accelerate starts jobs by accelerate launch alone: paste that line")
    if name in ("deepspeed", "ds"):
        return _deepspeed(rest)
    if not os.path.exists(first):
        _refuse_program(name, rest)
    return Launch(first, tuple(rest))


def _refuse_program(name: str, rest: Sequence[str]) -> None:
    """Refuses a first word that is no script, in one line."""
    known = [
        i for i, word in enumerate(rest) if re.fullmatch(r"python[\d.]*|torchrun|accelerate|deepspeed", word)
    ]  # what it would start
    advice = f"what stands behind it: pardemo measure -- {' '.join(rest[known[0] :])}" if known else ""
    if name in ELSEWHERE:
        raise ValueError(
            f"{name} starts processes on nodes that are not here: paste "
            + (advice or "the script and its arguments: pardemo measure --ranks 4 -- train.py ARGS")
        )
    if shutil.which(name):
        raise ValueError(
            f"{name} is a program, not a script: paste "
            + (advice or "the script or module that it runs: pardemo measure -m package.train ARGS")
        )


def _variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Reads ``NAME=VALUE`` before a command, as a shell does, also behind ``env``."""
    words = list(words[1:] if words[:1] == ["env"] else words)
    given = {}
    while words and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        given[match[1]] = match[2]
        del words[0]
    return given, words


def _python(words: list[str], ranks: int | None) -> Launch:
    while words:
        first = words.pop(0)
        if first == "-m":
            if not words:
                raise ValueError("python -m names no module")
            module, *rest = words
            if module in MODULES:
                launcher = MODULES[module]
                return _torchrun(rest, by_argument=True) if "." in launcher else _read([launcher, *rest], ranks)
            return Launch(module, tuple(rest), module=True)
        if first == "-" or first.startswith("-c"):
            raise ValueError(f"python {first} runs no file: write a script, pardemo measure -- train.py ARGS")
        if not first.startswith("-"):
            return Launch(first, tuple(words))
        if first in _PYTHON_VALUES:
            del words[:1]
    raise ValueError("python names no script: pardemo measure -- python train.py ARGS")


def _torchrun(words: list[str], by_argument: bool = False) -> Launch:
    """Reads torchrun's line; ``by_argument``: that of ``torch.distributed.launch``, which passes the local rank so."""
    import torch
    from torch.distributed import launch, run

    name = "torch.distributed.launch" if by_argument else "torchrun"
    args = _parse_options(name, launch.parse_args if by_argument else run.parse_args, words)
    hosts, _ = run.parse_min_max_nnodes(args.nnodes)
    of_gpus = args.nproc_per_node in ("gpu", "auto")
    notes: tuple[str, ...] = ()
    if of_gpus and not torch.cuda.is_available():
        host_ranks, notes = None, (_for_each_gpu(f"--nproc-per-node {args.nproc_per_node}"),)
    else:
        host_ranks = _launcher_result(name, lambda: run.determine_local_world_size(args.nproc_per_node))
    return Launch(
        args.training_script, tuple(args.training_script_args), bool(args.module),
        None if host_ranks is None else host_ranks * hosts, hosts, notes=notes,
        local_rank="" if run.get_use_env(args) else "--local-rank=",
    )  # fmt: skip


def _accelerate(words: list[str], ranks: int | None) -> Launch:
    """The line of ``accelerate launch``, on a machine with GPUs; without any, on one that has as many as ranks."""
    from pardemo import extras

    with extras.needed_by("accelerate launch"):
        from accelerate.commands.launch import launch_command_parser

    from pardemo.peers.accelerate import config_checks
    from pardemo.script.runtime.without_gpu import without_gpu

    name = "accelerate launch"
    args = _parse_options(name, launch_command_parser().parse_args, words)
    if ranks is not None:
        args.num_processes = ranks
    asked = args.num_processes or RANKS
    quiet = logging.getLogger("accelerate")  # tells which values it chose itself
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with project.environment({"LOCAL_WORLD_SIZE": str(asked)}), without_gpu([]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Port .* is already in use")  # no rank will use it
            args, variables, alone = _launcher_result(name, lambda: config_checks.launched(args))
    finally:
        quiet.setLevel(level)
    if args.tpu:
        raise ValueError(f"{name} would start this on TPUs: measure takes lines for GPUs and CPUs")
    if alone and (args.num_processes or 1) > 1:
        raise ValueError(
            f"{name} would start one process for this line, not {args.num_processes}: its options or its file say cpu "
            "or distributed_type NO. Say --multi_gpu, which measure runs on CPUs as well"
        )
    differ = {key: value for key, value in variables.items() if os.environ.get(key) != value}
    return Launch(
        args.training_script, tuple(args.training_script_args), bool(args.module),
        1 if alone else args.num_processes, max(args.num_machines or 1, 1), differ,
        sets="" if alone else "torchrun",
    )  # fmt: skip


def _deepspeed(words: list[str]) -> Launch:
    """Reads the line of the ``deepspeed`` launcher."""
    import torch

    from pardemo import extras
    from pardemo.script.runtime import libraries

    with (
        extras.needed_by("deepspeed"),
        project.environment(libraries.library_environment()),
        contextlib.redirect_stdout(sys.stderr),
    ):
        from deepspeed import constants
        from deepspeed.launcher import runner

    args = _parse_options("deepspeed", runner.parse_args, words)
    if args.autotuning:
        raise ValueError("deepspeed --autotuning tries many runs: measure one of them, without that option")
    pool = runner.fetch_hostfile(args.hostfile) if os.path.isfile(args.hostfile) else None
    if pool is None and args.num_nodes > 1:
        raise ValueError("deepspeed --num_nodes wants a hostfile, and there is none: measure --num_gpus of one node")
    gpus = torch.cuda.device_count()
    says = args.num_gpus > 0 or ":" in args.include
    by_host: dict[str, list[int]] = {"localhost": []}
    counted, notes = None, (_for_each_gpu("deepspeed without --num_gpus"),)
    if pool or gpus or says:
        gpus_of_hosts = pool or {"localhost": max(args.num_gpus, MAX_RANKS) if says else gpus}
        by_host = _launcher_result("deepspeed", lambda: _chosen_hosts(runner, gpus_of_hosts, args))
        if len({len(slots) for slots in by_host.values()}) != 1:
            raise ValueError("deepspeed's hosts have different numbers of GPUs: measure one number on each")
        counted = sum(map(len, by_host.values()))
    hosts, devices = len(by_host), next(iter(by_host.values()))
    environment = {constants.CROSS_RANK: "0", constants.CROSS_SIZE: str(hosts)}
    if devices and hosts == 1:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    return Launch(
        args.user_script, tuple(args.user_args), args.module, counted, hosts, environment, "deepspeed",
        "" if args.no_local_rank else "--local_rank=", notes if counted is None else (),
    )  # fmt: skip


def _chosen_hosts(runner: Any, pool: Mapping[str, int], args: argparse.Namespace) -> dict[str, list[int]]:
    """Returns hosts and their GPUs by DeepSpeed's own choice."""
    if (args.num_nodes >= 0 or args.num_gpus >= 0) and (args.include or args.exclude):
        raise ValueError("Cannot specify num_nodes/gpus with include/exclude")
    chosen = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
    return runner.apply_num_nodes_and_gpus(chosen, args.num_nodes, args.num_gpus)


def _for_each_gpu(launcher: str) -> str:
    return f"{launcher} is a rank for each GPU, and there is none here: --ranks says how many instead"


def _launcher_result(name: str, action: Callable[[], Any]) -> Any:
    """Returns what a launcher makes of its line; raises its refusal in one line."""
    try:
        return action()
    except (ValueError, RuntimeError, ConnectionError, OSError, AssertionError, KeyError, TypeError) as error:
        raise ValueError(f"{name}: {project.one_line(error)}") from None


def _parse_options(name: str, parse: Callable[[list[str]], argparse.Namespace], words: list[str]) -> argparse.Namespace:
    """Reads a launcher's options with its own parser."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            args = parse(words)
    except SystemExit:
        last = project.first_line(printed.getvalue().rpartition("error: ")[2])
        raise ValueError(f"{name} would refuse its line: {last}") from None
    if args.no_python:
        script = args.user_script if name == "deepspeed" else args.training_script
        option = "--no-python" if name.startswith("torch") else "--no_python"
        raise ValueError(f"{name} {option} runs {script}, which may be no Python: name the script")
    return args
