"""Sharded checkpoints of the ZeRO engines: each rank writes and reads its own part, on this or another number of ranks.

torch.distributed.checkpoint does the writing and the resharding. Its index is a pickle, so a folder is read only when
every file has the checksum that :func:`save` wrote down for it.
"""

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pardemo.zero.engine import Engine
from pardemo.zero.unit import Unit

MANIFEST = "pardemo.json"


def save(engine: Engine, folder: str | Path) -> None:
    """Writes the engine's states to ``folder``, in place of what was there. Collective; call it after ``step()``.

    A folder is whole or not there: everything goes to ``<folder>.partial`` first, and until the new one has its name
    the previous one is kept, as ``<folder>`` or ``<folder>.previous``.
    """
    folder = Path(folder)
    partial, previous = (folder.with_name(folder.name + ending) for ending in (".partial", ".previous"))
    first = dist.get_rank(engine.group) == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(engine.group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensors of uneven shards, deprecated names inside torch
        dcp.save(_states(engine), checkpoint_id=partial, process_group=engine.group)
    if first:
        manifest = _description(engine) | {
            "world_size": engine.size,
            "param_groups": [_plain(group) for group in engine.optimizer.param_groups],
            "sha256": {file.name: _checksum(file) for file in sorted(partial.iterdir())},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if folder.exists():
            shutil.rmtree(previous, ignore_errors=True)
            folder.rename(previous)
        partial.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
    dist.barrier(engine.group)


def load(engine: Engine, folder: str | Path) -> None:
    """Reads what :func:`save` wrote, by an engine of the same stage over the same model, on any number of ranks.

    Where ``folder`` was being replaced when its writer ended, the previous one is read. Collective.

    Raises:
        FileNotFoundError: no whole checkpoint there. ValueError: a file is missing or changed, or the checkpoint is of
            another stage, model or bucket size.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        folder = folder.with_name(folder.name + ".previous")
    if not (folder / MANIFEST).exists():
        raise FileNotFoundError(f"no whole checkpoint in {folder.with_suffix('').name}: it has no {MANIFEST}")
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, checksum in manifest["sha256"].items():
        if not (folder / name).exists() or _checksum(folder / name) != checksum:
            raise ValueError(f"checkpoint {folder.name}: {name} is missing, or is not the file that was written")
    for key, ours in _description(engine).items():
        if manifest[key] != ours:
            raise ValueError(f"checkpoint {folder.name} has {key} {manifest[key]}, this engine {ours}")
    _make_optimizer_states(engine)
    for group, saved in zip(engine.optimizer.param_groups, manifest["param_groups"], strict=True):
        group.update(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(_states(engine), checkpoint_id=folder, process_group=engine.group)
    for unit in engine.units:
        if unit.trained:
            with torch.no_grad():
                unit.shard.copy_(unit.master)
        if engine.stage < 3:
            unit.gather()


def _description(engine: Engine) -> dict[str, Any]:
    return {"stage": engine.stage, "units": [[u.numel, str(u.shard.dtype), u.trained] for u in engine.units]}


def _states(engine: Engine) -> dict[str, Any]:
    """What is written: each unit's shard as a part of a whole tensor, and what all ranks hold alike."""
    mesh = DeviceMesh.from_group(engine.group, engine.units[0].shard.device.type)
    units = {}
    for number, unit in enumerate(engine.units):
        tensors = {"parameters": unit.master if unit.trained else unit.shard}
        if unit.trained:
            tensors |= {k: v for k, v in engine.optimizer.state[unit.master].items() if torch.is_tensor(v)}
        units[str(number)] = {name: _part_of_whole(tensor, unit, mesh) for name, tensor in tensors.items()}
    in_units = {id(p) for unit in engine.units for p in unit.parameters}
    alike = {name: p.detach() for name, p in engine.module.named_parameters() if id(p) not in in_units}
    return {"units": units, "alike": alike | dict(engine.module.named_buffers())}


def _part_of_whole(tensor: torch.Tensor, unit: Unit, mesh: DeviceMesh) -> torch.Tensor:
    """The unpadded part of a shard as a DTensor; a scalar, such as a step count, as it is."""
    if tensor.dim() == 0:
        return tensor
    begin = dist.get_rank(unit.group) * unit.chunk
    own = tensor.detach()[: max(0, min(unit.chunk, unit.numel - begin))]
    shape = torch.Size([unit.numel])
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def _make_optimizer_states(engine: Engine) -> None:
    """An optimizer makes its states at its first step: one without effect, whose states are then overwritten."""
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    kept = [unit.master.detach().clone() for unit in engine.trained]
    for unit in engine.trained:
        unit.master.grad = torch.zeros_like(unit.master)
    engine.optimizer.step()
    for unit, value in zip(engine.trained, kept, strict=True):
        unit.master.grad = None
        unit.master.data.copy_(value)
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's settings as JSON keeps them."""
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}
    return {k: v for k, v in values.items() if isinstance(v, (int, float, str, list, bool, type(None)))}


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
