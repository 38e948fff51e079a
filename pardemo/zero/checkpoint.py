"""Sharded checkpoints of the ZeRO engines: each rank writes and reads its own part, on this or another number of ranks.

torch.distributed.checkpoint does the writing and the resharding. Its index is a pickle, so a folder is read only when
every file has the checksum that :func:`save` wrote down for it.
"""

import hashlib
import json
import shutil
import warnings
from itertools import zip_longest
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
PLAIN = (int, float, str, bool, type(None))


def save(engine: Engine, folder: str | Path) -> None:
    """Writes the engine's states to ``folder``, in place of what was there. Collective; call it after ``step()``.

    A folder is whole or not there: everything goes to ``<folder>.partial`` first, and until the new one has its name
    the previous one is kept, as ``<folder>`` or ``<folder>.previous``. Of buffers, each rank's own, one rank's is kept.

    Raises:
        RuntimeError: the engine is closed, or within a backward pass that failed.
        ValueError: the optimizer keeps something that is neither a tensor nor a number.
    """
    engine.check_usable()
    if engine.stage < 3:
        engine.take_over()
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
            "param_groups": [_settings(group) for group in engine.optimizer.param_groups],
            "counts": [_counts(engine, unit) for unit in engine.trained],
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
            another stage, model, bucket size or other parameter groups.
    """
    engine.check_usable()
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        folder = folder.with_name(folder.name + ".previous")
    if not (folder / MANIFEST).exists():
        raise FileNotFoundError(f"no whole checkpoint in {folder.with_suffix('').name}: it has no {MANIFEST}")
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, checksum in manifest["sha256"].items():
        if not (folder / name).exists() or _checksum(folder / name) != checksum:
            raise ValueError(f"checkpoint {folder.name}: {name} is missing, or is not the file that was written")
    _compare(manifest, _description(engine), f"checkpoint {folder.name}")
    _make_optimizer_states(engine)
    for group, saved in zip(engine.optimizer.param_groups, manifest["param_groups"], strict=True):
        for name, value in saved.items():
            group[name] = group[name].new_tensor(value) if torch.is_tensor(group.get(name)) else value
    for unit, counts in zip(engine.trained, manifest["counts"], strict=True):
        engine.optimizer.state[unit.master].update(counts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(_states(engine), checkpoint_id=folder, process_group=engine.group)
    for unit in engine.units:
        if unit.trained:
            with torch.no_grad():
                unit.shard.copy_(unit.master)
        if engine.stage < 3:
            unit.gather("checkpoint")


def _description(engine: Engine) -> dict[str, Any]:
    """What a checkpoint and the engine that reads it have to agree on; each unit by the names of its parameters."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return {
        "stage": engine.stage,
        "parameter groups": len(engine.param_groups.settings),
        "units": [
            {
                "parameters": [names[id(p)] for p in unit.parameters],
                "elements": unit.numel,
                "dtype": str(unit.shard.dtype),
                "trained": unit.trained,
                "group": unit.settings,
            }
            for unit in engine.units
        ],
    }


def _compare(manifest: dict[str, Any], ours: dict[str, Any], what: str) -> None:
    """ValueError that names the first thing in which they differ."""
    for key in ("stage", "parameter groups"):
        if manifest.get(key) != ours[key]:
            raise ValueError(f"{what} has {key} {manifest.get(key)}, this engine {ours[key]}")
    group_of, our_group_of = (
        {name: unit["group"] for unit in units for name in unit["parameters"]}
        for units in (manifest["units"], ours["units"])
    )
    for name in group_of.keys() ^ our_group_of.keys():
        raise ValueError(f"{what} is of another model: only one of both has {name}")
    for name, group in group_of.items():
        if group != our_group_of[name]:
            raise ValueError(f"{what} has {name} in parameter group {group}, this engine in {our_group_of[name]}")
    for theirs, unit in zip_longest(manifest["units"], ours["units"]):
        if theirs != unit:
            raise ValueError(
                f"{what} has other units than this engine (layers, buckets, dtypes): {theirs} against {unit}"
            )


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
    """The unpadded part of a shard as a DTensor; what is no shard, such as a step count, as it is."""
    if tensor.shape != unit.shard.shape:
        return tensor
    begin = unit.rank * unit.chunk
    own = tensor.detach()[: max(0, min(unit.chunk, unit.numel - begin))]
    shape = torch.Size([unit.numel])
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def _make_optimizer_states(engine: Engine) -> None:
    """An optimizer makes its states at its first step: one whose effect is taken back; the states are overwritten."""
    for unit in engine.trained:
        before = unit.master.detach().clone()
        engine.update(unit, torch.zeros_like(unit.master))
        unit.master.data.copy_(before)


def _counts(engine: Engine, unit: Unit) -> dict[str, Any]:
    """What the optimizer keeps of a unit beside tensors: the same on every rank."""
    counts = {k: v for k, v in engine.optimizer.state[unit.master].items() if not torch.is_tensor(v)}
    for name, value in counts.items():
        if not isinstance(value, PLAIN):
            raise ValueError(
                f"the optimizer keeps {name}, a {type(value).__name__}: checkpoints hold tensors and numbers"
            )
    return counts


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as JSON keeps them."""
    values = {k: v.item() if torch.is_tensor(v) and not v.dim() else v for k, v in group.items() if k != "params"}
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return {k: v for k, v in values.items() if isinstance(v, (*PLAIN, list))}


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
