"""Runs Hugging Face Accelerate on CPU ranks: the shim they need, what really runs, and what it sends and keeps.

Accelerate takes its configuration (DDP, FSDP2, DeepSpeed) from environment variables that ``accelerate launch`` sets
from a file. On CPU ranks several configurations fall back to something else without a word and with exit status 0, so
nothing here is believed: the distributed type, the number of processes and the class of the wrapped model are
compared with what was asked for after every run.
"""

import atexit
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pardemo import compat, extras, signed_folders

with extras.needed_by(__name__):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType, PartialState

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

#: Variables that ``accelerate launch`` sets for the ranks; their prefixes.
PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
#: What any launcher tells a rank about its place. Without these a process is alone.
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")


def cpu_ranks() -> None:
    """Makes Accelerate see ranks of a launcher's job on a machine without GPUs. On GPUs, and alone, it does nothing.

    Called once, before ``Accelerator()``. Each form needs something else (Accelerate 1.15):

    - DDP: the state says ``cpu=True``; without it every rank believes itself alone.
    - DeepSpeed: the backend is named; without it every rank believes itself alone, and takes all of the data.
    - FSDP2: besides, the state claims to be the multi-GPU one, the only one for which Accelerate takes FSDP up; the
      device stays the CPU. Without it the ranks train copies that nobody keeps equal.

    And every form waits a moment before it ends: see :func:`pardemo.world.rank.end`.
    """
    if torch.cuda.is_available() or "RANK" not in os.environ or compat.PartialState_shared:
        return
    _wait_at_exit()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # Accelerate imports DeepSpeed under every form
    if _is_true("ACCELERATE_USE_DEEPSPEED"):
        from pardemo.peers.deepspeed import engine as deepspeed

        deepspeed.prepare()
        PartialState(backend="gloo")
    elif _is_true("ACCELERATE_USE_FSDP"):
        PartialState(backend="gloo")
        compat.PartialState_shared["distributed_type"] = DistributedType.MULTI_GPU
    else:
        PartialState(cpu=True)


@functools.cache
def _wait_at_exit() -> None:
    """Once for a process: gloo's threads end their last work while Python still is what it was."""
    atexit.register(time.sleep, 0.3)


def what_runs(model: nn.Module) -> dict[str, Any]:
    """Reads from Accelerate and the prepared model what really runs: a dict with ``Configuration.expected``'s keys."""
    state = PartialState()
    stage = getattr(model, "zero_optimization_stage", None)
    return {
        "distributed_type": state.distributed_type.value,
        "num_processes": state.num_processes,
        "wrapped": wrapped(model),
        "zero_stage": stage() if callable(stage) else None,
        "mixed_precision": AcceleratorState().mixed_precision,
    }


def assert_runs(running: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises RuntimeError, naming each difference, where something else runs than was asked for."""
    pairs = {key: (running.get(key), value) for key, value in expected.items()}
    if wrong := [f"{key} is {has!r}, not {value!r}" for key, (has, value) in pairs.items() if has != value]:
        raise RuntimeError("Accelerate runs something else than it was asked for: " + "; ".join(wrong))


@contextlib.contextmanager
def as_launched(environment: Mapping[str, str]) -> Iterator[None]:
    """This rank of a World as ``accelerate launch`` would have started it, with Accelerate's state fresh.

    ``environment`` is :func:`pardemo.peers.accelerate.config_checks.environment`'s; one process is told of no rank.
    """
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        del os.environ[name]
    os.environ.update(environment)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        for name in PLACE:
            os.environ.pop(name, None)
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it tells of tied weights at every checkpoint
    _forget()
    try:
        yield
    finally:
        _forget()
        os.environ.clear()
        os.environ.update(before)


def _is_true(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


def wrapped(model: nn.Module) -> str:
    """The class that Accelerate has put around a model, by name.

    FSDP2 makes a class of its own for each model; its base is told by name, since importing it takes a second.
    """
    bases = [base.__name__ for base in type(model).__mro__]
    return "FSDPModule" if "FSDPModule" in bases else bases[0]


@contextlib.contextmanager
def before_update(model: nn.Module, note: Callable[[], object]) -> Iterator[None]:
    """Calls ``note()`` between the backward pass and the update, wherever the form does that."""
    if wrapped(model) == "DeepSpeedEngine":
        update: Any = model.step
        with compat.replaced(model, "step", lambda *args, **kwargs: (note(), update(*args, **kwargs))[1]):
            yield
    else:
        with register_optimizer_step_pre_hook(lambda *_: note() and None):  # type: ignore[arg-type]
            yield


def _forget() -> None:
    """Accelerate keeps its state in class attributes: one configuration per process, unless it is made to forget."""
    compat.AcceleratorState_reset(True)
    compat.GradientState_reset()


def save_state(accelerator: Accelerator, folder: Path) -> None:
    """``accelerator.save_state``, and a signature for the folder when all ranks have written. Collective."""
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        signed_folders.sign(folder)
    accelerator.wait_for_everyone()


def load_state(accelerator: Accelerator, folder: Path) -> None:
    """``accelerator.load_state`` of a folder that :func:`save_state` wrote for this user: DeepSpeed's states and
    FSDP2's index are pickles, which can run code.

    Raises:
        ValueError: the folder has no signature, another user's, or other files than were written.
    """
    if (reason := signed_folders.fault(folder)) is not None:
        raise ValueError(f"{folder} is not read, since it may hold pickles: {reason}")
    accelerator.load_state(folder)
