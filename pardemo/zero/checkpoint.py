"""Sharded checkpoints of the ZeRO engines: each rank writes and reads its own part, on this or another number of ranks.

The folder (:mod:`pardemo.zero.checkpoint_folder`) holds JSON and safetensors, so that reading one runs no code, whoever
wrote it. Rank r of N keeps elements [r·chunk, (r+1)·chunk) of each unit; on another number of ranks, each reads the
pieces that its own chunks overlap. A unit of ten elements, written by four ranks (chunk 3) and read by two (chunk 5)::

    files     [ 0 1 2 ] [ 3 4 5 ] [ 6 7 8 ] [ 9 ]
    rank 0    [ 0 1 2     3 4 ]                       two pieces, from files 0 and 1
    rank 1                [ 5       6 7 8     9 ]     three, from files 1, 2 and 3
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pardemo.collectives.outcome import same_outcome
from pardemo.zero import checkpoint_compare as compare
from pardemo.zero import checkpoint_folder as files
from pardemo.zero.engine import Engine
from pardemo.zero.unit import Unit


def save(engine: Engine, folder: str | Path) -> None:
    """Writes the engine's states to ``folder``, in place of what was there. Collective; call it after ``step()``.

    A folder is whole or not there: everything goes to ``<folder>.partial`` first, and until the new one has its name
    the previous one is kept, as ``<folder>`` or ``<folder>.previous``. Of buffers, each rank's own, one rank's is kept.
    An error on one rank is raised on all.

    Raises:
        RuntimeError: the engine is closed, or within a backward pass that failed.
        ValueError: the optimizer keeps something that is neither a tensor nor a number, or is not cut as the parameters
            are and differs from rank to rank.
    """
    folder, group = Path(folder), engine.group
    rank = dist.get_rank(group)
    with same_outcome(group):
        engine.check_usable()
        if engine.stage < 3:
            engine.take_over()
        states = [_states(engine, unit) for unit in engine.units]
        if rank == 0:
            files.begin(folder)
    with same_outcome(group):
        entry = files.write_tensors(folder, rank, _tensors(engine, states))
        described = [_described(unit, state) for unit, state in zip(engine.units, states, strict=True)]
        digest = files.digest_of(tensor for state in states for tensor in state.alike.values())
    written: list[Any] = [None] * engine.size
    dist.all_gather_object(written, (entry, described, digest), group=group)
    with same_outcome(group):
        entries, descriptions, digests = zip(*written, strict=True)
        compare.compare_ranks(descriptions, digests)
        if rank == 0:
            manifest = _description(engine) | {
                "optimizer": type(engine.optimizer).__name__,
                "param_groups": [_settings(settings) for settings in engine.optimizer.param_groups],
                "states": described,
                "files": list(entries),
            }
            files.write_manifest(folder, manifest)
            files.give_name(folder)


def load(engine: Engine, folder: str | Path) -> None:
    """Reads what :func:`save` wrote, by an engine of the same stage over the same model, on any number of ranks.

    Where ``folder`` was being replaced when its writer ended, the previous one is read. A checkpoint that is refused
    leaves the engine as it was. Collective; an error on one rank is raised on all.

    Raises:
        FileNotFoundError: no whole checkpoint there.
        ValueError: a file is missing or changed, or the checkpoint is of the older format (with pickles, which are not
            read), or of another stage, model, bucket size, optimizer or other parameter groups.
    """
    group, source = engine.group, [None]
    with same_outcome(group):
        engine.check_usable()
        if dist.get_rank(group) == 0:  # the same one for all, while another job may be replacing it
            source = [files.read_manifest(Path(folder))]
    dist.broadcast_object_list(source, dist.get_global_rank(group, 0), group=group)
    name, manifest = source[0]
    where, what = Path(folder).with_name(name), f"checkpoint {name}"
    with _states_to_compare(engine), same_outcome(group):
        compare.check_form(manifest, what)
        compare.compare_models(manifest, _description(engine), what)
        for rank in range(dist.get_rank(group), len(manifest["files"]), engine.size):
            files.check_file(where, rank, manifest["files"][rank])
        states = _make_states(engine)
        same_optimizer = manifest.get("optimizer") == type(engine.optimizer).__name__
        for number, (unit, state) in enumerate(zip(engine.units, states, strict=True)):
            saved = manifest["states"][number]
            if not (same_optimizer and compare.has_no_states(saved)):
                compare.compare_states(saved, _described(unit, state), f"{what}, unit {number}")
        for settings, saved in zip(engine.optimizer.param_groups, manifest["param_groups"], strict=True):
            compare.check_settings(saved, settings, what)
        reader = files.Reader(where)
        _check_tensors(reader, manifest, engine)
    with same_outcome(group), torch.no_grad():
        _copy(reader, manifest, engine, states)
    for unit in engine.units:
        if unit.trained:
            with torch.no_grad():
                unit.shard.copy_(unit.master)
        if engine.stage < 3:
            unit.gather("checkpoint")


class _States(NamedTuple):
    """What is saved of a unit. ``sharded``: this rank's chunks; ``alike``, ``numbers``: the same on every rank."""

    sharded: dict[str, torch.Tensor]
    alike: dict[str, torch.Tensor]
    numbers: dict[str, Any]


def _states(engine: Engine, unit: Unit) -> _States:
    states = _States({"parameters": unit.master if unit.trained else unit.shard}, {}, {})
    kept = engine.optimizer.state.get(unit.master, {}) if unit.trained else {}
    for name, value in kept.items():
        if torch.is_tensor(value):
            (states.sharded if value.shape == unit.shard.shape else states.alike)[f"optimizer.{name}"] = value
        elif isinstance(value, compare.PLAIN):
            states.numbers[name] = value
        else:
            raise ValueError(
                f"the optimizer keeps {name}, a {type(value).__name__}: checkpoints hold tensors and numbers"
            )
    return states


def _described(unit: Unit, states: _States) -> dict[str, Any]:
    """A unit's states in the manifest."""
    sharded = {name: str(tensor.dtype) for name, tensor in states.sharded.items()}
    return {"chunk": unit.chunk, "sharded": sharded, "alike": _forms(states.alike), "numbers": states.numbers}


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
        "alike": _forms(_alike(engine)),
    }


def _alike(engine: Engine) -> dict[str, torch.Tensor]:
    """Parameters that are in no unit, and buffers."""
    in_units = {id(p) for unit in engine.units for p in unit.parameters}
    parameters = {name: p.detach() for name, p in engine.module.named_parameters() if id(p) not in in_units}
    return parameters | dict(engine.module.named_buffers())


def _forms(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as JSON keeps them."""
    values = {k: v.item() if torch.is_tensor(v) and not v.dim() else v for k, v in group.items() if k != "params"}
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return {k: v for k, v in values.items() if compare.is_plain(v)}


def _own(tensor: torch.Tensor, unit: Unit) -> torch.Tensor:
    """The unpadded part of a shard."""
    return tensor.detach()[: max(0, min(unit.chunk, unit.numel - unit.rank * unit.chunk))]


def _tensors(engine: Engine, states: list[_States]) -> dict[str, torch.Tensor]:
    """What this rank writes."""
    tensors = {}
    for number, (unit, kept) in enumerate(zip(engine.units, states, strict=True)):
        own = {name: _own(tensor, unit) for name, tensor in kept.sharded.items()}
        tensors |= {f"{number}.{name}": part for name, part in own.items() if part.numel()}
        if unit.rank == 0:
            tensors |= {f"{number}.{name}": tensor for name, tensor in kept.alike.items()}
    if dist.get_rank(engine.group) == 0:
        tensors |= {f"module.{name}": tensor for name, tensor in _alike(engine).items()}
    return tensors


@contextlib.contextmanager
def _states_to_compare(engine: Engine) -> Iterator[None]:
    """On an error the optimizer is again as it was: without the states that :func:`_make_states` made."""
    new = [unit for unit in engine.trained if not engine.optimizer.state.get(unit.master)]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    try:
        yield
    except Exception:
        for unit in new:
            engine.optimizer.state.pop(unit.master, None)
        for group, before in zip(engine.optimizer.param_groups, settings, strict=True):
            group.update(before)
        raise


def _make_states(engine: Engine) -> list[_States]:
    """An optimizer makes its states at its first step: one whose effect on the masters is taken back."""
    for unit in engine.trained:
        if not engine.optimizer.state.get(unit.master):
            before = unit.master.detach().clone()
            engine.update(unit, torch.zeros_like(unit.master))
            unit.master.data.copy_(before)
    return [_states(engine, unit) for unit in engine.units]


def _pieces(unit: Unit, saved: dict[str, Any]) -> Iterator[tuple[int, slice, slice]]:
    """Where this rank's chunk lies in the files: the rank that wrote it, the place in its chunk, the place in ours."""
    begin = unit.rank * unit.chunk
    for rank, first, last in files.parts(unit.numel, saved["chunk"], begin, begin + unit.chunk):
        at = rank * saved["chunk"]
        yield rank, slice(first - at, last - at), slice(first - begin, last - begin)


def _check_tensors(reader: files.Reader, manifest: dict[str, Any], engine: Engine) -> None:
    """ValueError where a file has other tensors than the manifest says, before any is copied."""
    for number, (unit, saved) in enumerate(zip(engine.units, manifest["states"], strict=True)):
        for name, dtype in saved["sharded"].items():
            for rank, _, _ in _pieces(unit, saved):
                length = min(saved["chunk"], unit.numel - rank * saved["chunk"])
                reader.check_form(rank, f"{number}.{name}", [dtype, [length]])
        for name, form in saved["alike"].items():
            reader.check_form(0, f"{number}.{name}", form)
    for name, form in manifest["alike"].items():
        reader.check_form(0, f"module.{name}", form)


def _copy(reader: files.Reader, manifest: dict[str, Any], engine: Engine, states: list[_States]) -> None:
    """The checkpoint's values into the engine."""
    for number, (unit, kept) in enumerate(zip(engine.units, states, strict=True)):
        saved = manifest["states"][number]
        for name in saved["sharded"]:
            for rank, theirs, ours in _pieces(unit, saved):
                kept.sharded[name].detach()[ours].copy_(reader.tensor(rank, f"{number}.{name}", theirs))
        for name in saved["alike"]:
            kept.alike[name].copy_(reader.tensor(0, f"{number}.{name}"))
        if unit.trained and compare.has_no_states(saved):  # it was saved before the optimizer's first step
            engine.optimizer.state.pop(unit.master, None)
        elif unit.trained:
            engine.optimizer.state[unit.master].update(saved["numbers"])
    for name, tensor in _alike(engine).items():
        tensor.copy_(reader.tensor(0, f"module.{name}"))
    for group, saved in zip(engine.optimizer.param_groups, manifest["param_groups"], strict=True):
        for name, value in saved.items():
            group[name] = compare.like(value, group.get(name))
