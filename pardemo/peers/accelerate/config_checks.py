"""Checks Accelerate's configuration files before anything starts, and reads them as ``accelerate launch`` does.

Accelerate refuses a key at the top of the file that it does not know. Inside a section (``fsdp_config``,
``deepspeed_config`` …) it takes any key and ignores it, and a number of processes that the machine has no room for it
finds out rank by rank. :func:`check` says both in one line.
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pardemo import argument_checks, compat, project
from pardemo.peers.deepspeed import deepspeed_settings

_TYPES = {"NO": 1, "MULTI_GPU": 2, "FSDP": 1, "DEEPSPEED": 1, "MEGATRON_LM": 2}  # type -> least number of processes
_PRECISIONS = {"no": False, "bf16": False, "fp16": True, "fp8": True}  # name -> whether it needs a GPU
#: Section -> the type that it belongs to, and the heading of its keys among the options of ``accelerate launch``.
_SECTIONS = {
    "fsdp_config": ("FSDP", "FSDP Arguments"),
    "deepspeed_config": ("DEEPSPEED", "DeepSpeed Arguments"),
    "megatron_lm_config": ("MEGATRON_LM", "Megatron-LM Arguments"),
    "parallelism_config": (None, "ParallelismConfig Arguments"),
}
#: What Accelerate wants in DeepSpeed's own file, if there is one, and refuses beside it.
_DEEPSPEEDS_KEYS = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
    "mixed_precision",
}  # fmt: skip


def read_config(path: Path) -> dict[str, Any]:
    """The content of a configuration file, checked.

    Raises:
        ValueError: it is no YAML with keys, or what :func:`check` says; the file is named.
        OSError: it cannot be read.
    """
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {project.one_line(error)}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: a configuration has keys and values")
    try:
        check(settings, path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return settings


def check(config: Mapping[str, Any], folder: Path = Path()) -> None:
    """Raises ValueError, in one line that names the key, for what Accelerate ignores, refuses late or runs otherwise.

    An unknown key, at the top or in a section; a precision that there is not, or not on this machine; a form that
    would silently be one process (``MULTI_CPU``, ``use_cpu``); more processes than the machine allows (a GPU each; on
    the CPU as many as a World has ranks); hosts among which the processes do not divide; a DeepSpeed file that is not
    there, or that DeepSpeed would refuse.
    """
    from accelerate.commands.config.config_args import ClusterConfig

    deepspeed_settings.refuse_unknown(config, set(ClusterConfig.__dataclass_fields__), "the configuration")
    kind: Any = config.get("distributed_type")
    if kind == "MULTI_CPU" or config.get("use_cpu"):
        raise ValueError("MULTI_CPU and use_cpu: true start one process without a word (unless mpirun is there): "
                         "say distributed_type MULTI_GPU and use_cpu false, and call cpu_ranks()")  # fmt: skip
    _one_of("distributed_type", kind, _TYPES)
    _check_precision(config)
    _check_processes(config, kind)
    for section, (owner, title) in _SECTIONS.items():
        if not isinstance(config.get(section, {}), Mapping):
            raise ValueError(f"{section} must be a section of keys, not {config[section]!r}")
        if config.get(section) and owner not in (None, kind):
            raise ValueError(f"{section} is ignored under distributed_type {kind}: it belongs to {owner}")
        deepspeed_settings.refuse_unknown(config.get(section, {}), _keys(title), section)
    if config.get("parallelism_config"):
        _check_parallelism(config["parallelism_config"], config.get("num_processes"))
    if kind == "DEEPSPEED":
        _check_deepspeed(config, folder)


def check_deepspeed(settings: Mapping[str, Any], processes: int) -> None:
    """Raises ValueError for settings of DeepSpeed's own file that it, or Accelerate with it, would not honour."""
    import torch

    deepspeed_settings.check_settings(settings, processes, on_cpu=not torch.cuda.is_available())
    if settings.get("gradient_clipping", "auto") == "auto":
        raise ValueError("gradient_clipping has to be a number: left out, Accelerate makes it 1.0, whatever the script "
                         "clips at (0.0 is no clipping)")  # fmt: skip


def most_processes() -> int:
    """Returns the most processes of this machine: one per GPU; without GPUs as many CPU ranks as a World may have."""
    import torch

    from pardemo.cluster import MAX_RANKS

    return torch.cuda.device_count() or MAX_RANKS


def environment(path: Path) -> dict[str, str]:
    """The variables that ``accelerate launch --config_file`` sets for its ranks, by Accelerate's own code."""
    from accelerate.commands import launch

    from pardemo.peers.accelerate.training import PREFIXES

    parsed = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    variables = {name: value for name, value in launched(parsed)[1].items() if name.startswith(PREFIXES)}
    file = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    return variables | ({file: str(path.parent / variables[file])} if file in variables else {})


def launched(args: argparse.Namespace) -> tuple[argparse.Namespace, dict[str, str], bool]:
    """Lets ``accelerate launch`` evaluate its parsed options, by its own code, without starting anything.

    Returns the options together with its configuration file's, all variables that each process would have, and whether
    it would start a single process that knows of no others.

    Raises:
        ValueError, OSError: what Accelerate says of options or files that it refuses.
    """
    from accelerate.utils import launch as prepare

    args, defaults, from_file = compat.validate_launch(args)
    if args.use_deepspeed and not args.cpu:  # as launch_command does before its launcher
        fields = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return args, prepare.prepare_deepspeed_cmd_env(args)[1], False
    if (args.multi_gpu or args.use_fsdp or args.use_megatron_lm) and not args.cpu:
        return args, prepare.prepare_multi_gpu_env(args), False
    return args, prepare.prepare_simple_launcher_cmd_env(args)[1], True


def _keys(title: str) -> set[str]:
    """The keys of a section are options of ``accelerate launch``; in ``fsdp_config`` their prefix may be left out."""
    from accelerate.commands.launch import launch_command_parser

    keys = compat.default_options(launch_command_parser(), title)
    return keys | {key.removeprefix("fsdp_") for key in keys}


def _one_of(key: str, value: Any, names: Mapping[str, Any]) -> None:
    if not isinstance(value, str) or value not in names:
        quotes = " (YAML reads a bare no as that: put it in quotes)" if value is False else ""
        raise ValueError(f"{key} is one of {', '.join(names)}, not {value!r}{quotes}")


def _check_precision(config: Mapping[str, Any]) -> None:
    import torch

    precision = config.get("mixed_precision", "no")
    _one_of("mixed_precision", precision, _PRECISIONS)
    if _PRECISIONS[precision] and not torch.cuda.is_available():
        raise ValueError(f"mixed_precision {precision} needs a GPU: take bf16 or no")


def _check_processes(config: Mapping[str, Any], kind: str) -> None:
    import torch

    processes = argument_checks.whole_number(config.get("num_processes", 1 if kind == "NO" else None), "num_processes")
    machines = argument_checks.whole_number(config.get("num_machines", 1), "num_machines")
    if kind == "NO" and processes != 1:
        raise ValueError(f"distributed_type NO is one process, num_processes is {processes}")
    if processes < _TYPES[kind]:
        raise ValueError(f"distributed_type {kind} needs num_processes of at least {_TYPES[kind]}, not {processes}")
    if processes % machines:
        raise ValueError(f"num_processes {processes} does not divide among num_machines {machines}")
    for key in ("main_process_ip", "main_process_port"):
        if machines > 1 and not config.get(key):
            raise ValueError(f"{machines} machines need {key}, where they meet")
    if processes // machines > most_processes():
        on = f" on {machines} machines" if machines > 1 else ""
        limit = f"{most_processes()} GPUs" if torch.cuda.is_available() else f"room for {most_processes()} CPU ranks"
        raise ValueError(f"num_processes {processes}{on} is more than the machine allows: it has {limit}")


def _check_parallelism(section: Mapping[str, Any], processes: Any) -> None:
    """The sizes of Accelerate's ParallelismConfig, whose product are the processes: it says so rank by rank."""
    keys = {name: f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    sizes = {name: argument_checks.whole_number(section.get(key, 1), key) for name, key in keys.items()}
    if math.prod(sizes.values()) != processes:
        degrees = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1"
        raise ValueError(f"parallelism_config is {degrees}: not num_processes {processes}")


def _check_deepspeed(config: Mapping[str, Any], folder: Path) -> None:
    section = config.get("deepspeed_config", {})
    if (file := section.get("deepspeed_config_file")) is None:
        return
    if both := ", ".join(sorted(_DEEPSPEEDS_KEYS & {*section, *config})):
        raise ValueError(f"{both} beside deepspeed_config_file: Accelerate refuses both; put it there")
    if not isinstance(file, str):
        raise ValueError(f"deepspeed_config_file must name a file, not {file!r}")
    if not (folder / file).is_file():
        raise ValueError(f"deepspeed_config_file: there is no {folder / file}")
    try:
        settings = json.loads((folder / file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"deepspeed_config_file: {file} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"deepspeed_config_file: {file} is not an object in braces")
    check_deepspeed(settings, config["num_processes"])
