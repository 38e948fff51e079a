"""Checkpoints of the ZeRO engines: each rank writes and reads its own part, on this or another number of ranks.

``torch.distributed.checkpoint`` writes and reads the tensors, in safetensors, and cuts them anew for other ranks. A
manifest in JSON beside them has the numbers, and each file's size and SHA-256. Neither can hold code::

    step-500/
      pardemo.json                                     what was saved: settings, numbers, the files
      shard-00001-model-00001-of-00001.safetensors     rank 0's shards, and a part of what all ranks hold alike
      shard-00002-model-00001-of-00001.safetensors     rank 1's
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pardemo import project
from pardemo.zero.checks import same_outcome
from pardemo.zero.engine import Engine

MANIFEST, FORMAT = "pardemo.json", 3
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError)


def save(engine: Engine, folder: str | Path) -> None:
    """Writes the engine's states to ``folder``, in place of what was there. Collective; call it after ``step()``.

    A folder is whole or not there: everything goes to ``<folder>.partial`` first, and until the new one has its name
    the previous one is kept, as ``<folder>`` or ``<folder>.previous``. Of buffers, each rank's own, one rank's is kept.
    An error on one rank is raised on all.

    Raises:
        RuntimeError: the engine is closed, or within a backward pass that failed.
        ValueError: the optimizer keeps something that is neither cut as the parameters are nor a number, or numbers
            that differ from rank to rank. OSError: no space, or such.
    """
    from torch.distributed import checkpoint as dcp

    folder, group, rank = Path(folder), engine.group, dist.get_rank(engine.group)
    partial, previous = folder.with_name(folder.name + ".partial"), _previous(folder)
    with same_outcome(group):
        engine.check_usable()
        tensors, shards = _saved(engine)
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
    subject = f"{folder.name} cannot be written"
    _run(OSError, subject, lambda: dcp.save(tensors, storage_writer=writer, process_group=group))
    names = sorted(path.name for path in partial.iterdir())
    written: list[Any] = [None] * engine.size
    digests = {name: _size_and_digest(partial / name) for name in names[rank :: engine.size]}
    dist.all_gather_object(written, (digests, json.dumps(shards)), group=group)
    with same_outcome(group):
        for other, (_, theirs) in enumerate(written):
            if theirs != written[0][1]:
                raise ValueError(f"the optimizer keeps numbers that differ on rank 0 and rank {other}: save them apart")
        if rank == 0:
            content = _description(engine) | {
                "shards": shards,
                "param_groups": [_settings(settings) for settings in engine.optimizer.param_groups],
                "files": {name: entry for files, _ in written for name, entry in files.items()},
            }
            with (partial / MANIFEST).open("w", encoding="utf-8") as manifest:
                json.dump({"format": FORMAT, "sha256": _digest(content), "content": content}, manifest, indent=1)
                manifest.flush()
                os.fsync(manifest.fileno())
            if folder.exists():
                shutil.rmtree(previous, ignore_errors=True)
                folder.rename(previous)
            partial.rename(folder)
            shutil.rmtree(previous, ignore_errors=True)


def load(engine: Engine, folder: str | Path) -> None:
    """Reads what :func:`save` wrote, by an engine of the same stage over the same model, on any number of ranks.

    Where ``folder`` was being replaced when its writer ended, the previous one is read. A checkpoint that is refused
    leaves the engine as it was. Collective; an error on one rank is raised on all.

    Raises:
        FileNotFoundError: no whole checkpoint there.
        ValueError: a file is missing or changed, or the checkpoint is of an older format, or of another stage, model,
            bucket size, optimizer or other parameter groups.
    """
    from torch.distributed import checkpoint as dcp

    group = engine.group
    source: list[Any] = [None]
    with same_outcome(group):
        engine.check_usable()
        if dist.get_rank(group) == 0:  # the same one for all, while another job may be replacing it
            source = [_read_manifest(Path(folder))]
    dist.broadcast_object_list(source, dist.get_global_rank(group, 0), group=group)
    name, content = source[0]
    where, subject = Path(folder).with_name(name), f"checkpoint {name}"
    with same_outcome(group):
        try:
            _compare_content(content, _description(engine), subject)
            _check_files(where, content["files"], dist.get_rank(group), engine.size, subject)
            tensors, settings = _targets(engine, content["shards"]), _as_now(content["param_groups"], engine)
            numbers = {key: _numbers(shard["numbers"]) for key, shard in content["shards"].items()}
        except _MALFORMED as error:
            if str(error).startswith(subject):
                raise
            raise ValueError(f"{subject}: the manifest is not as it is written ({_line(error)})") from None
    reader = dcp.HuggingFaceStorageReader(str(where))
    _run(ValueError, f"{subject} cannot be read", lambda: dcp.load(tensors, storage_reader=reader, process_group=group))
    with torch.no_grad():
        for key, tensor in engine.replicated().items():
            tensor.copy_(tensors[f"alike.{key}"])
        for key, shard in engine.shards().items():
            shard.as_dtensor(shard.master.detach()).copy_(tensors[f"shard.{key}"])
            state = dict(numbers[key])
            for kind in content["shards"][key]["states"]:
                saved = tensors[f"state.{kind}.{key}"]
                state[kind] = torch.zeros_like(shard.master, dtype=saved.dtype)
                shard.as_dtensor(state[kind]).copy_(saved)
            engine.optimizer.state.pop(shard.master, None)
            if state:  # none, where it was saved before the optimizer's first step
                engine.optimizer.state[shard.master].update(state)
    for current, setting in zip(engine.optimizer.param_groups, settings, strict=True):
        current.update(setting)
    engine.after_load()


def _saved(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors that are written, and what the manifest says of each shard."""
    tensors = {f"alike.{name}": tensor.detach().contiguous() for name, tensor in engine.replicated().items()}
    described = {}
    for name, shard in engine.shards().items():
        tensors[f"shard.{name}"] = shard.as_dtensor(shard.master.detach())
        states: dict[str, str] = {}
        numbers: dict[str, Any] = {}
        for key, value in engine.optimizer.state.get(shard.master, {}).items():
            if torch.is_tensor(value) and value.shape == shard.master.shape:
                tensors[f"state.{key}.{name}"] = shard.as_dtensor(value)
                states[key] = str(value.dtype)
            elif torch.is_tensor(value) and value.numel() == 1:
                numbers[key] = [str(value.dtype), value.item()]
            elif isinstance(value, (int, float, str, bool, type(None))):
                numbers[key] = value
            else:
                raise ValueError(f"the optimizer keeps {key}, a {type(value).__name__} that is no number and no shard")
        described[name] = {"of": shard.contents, "states": states, "numbers": numbers}
    return tensors, described


def _targets(engine: Engine, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Where a checkpoint's tensors are read to: the engine stays as it is until all are there."""
    tensors = {f"alike.{name}": torch.zeros(t.shape, dtype=t.dtype) for name, t in engine.replicated().items()}
    for name, shard in engine.shards().items():
        local = shard.master.detach()
        tensors[f"shard.{name}"] = shard.as_dtensor(torch.zeros_like(local))
        for key, dtype in saved[name]["states"].items():
            tensors[f"state.{key}.{name}"] = shard.as_dtensor(torch.zeros_like(local, dtype=_DTYPES[dtype]))
    return tensors


def _numbers(saved: dict[str, Any]) -> dict[str, Any]:
    """What the optimizer kept as numbers, and as tensors of one."""
    as_tensors = {key: torch.tensor(v[1], dtype=_DTYPES[v[0]]) for key, v in saved.items() if isinstance(v, list)}
    return saved | as_tensors


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as JSON keeps them: numbers, text, None, and lists of these."""
    values = {k: v.item() if torch.is_tensor(v) and not v.dim() else v for k, v in group.items() if k != "params"}
    return {k: v for k, v in values.items() if isinstance(v, (int, float, str, bool, tuple, list, type(None)))}


def _as_now(saved: list[dict[str, Any]], engine: Engine) -> list[dict[str, Any]]:
    """The saved settings in the form that this optimizer has them in: a tensor, a tuple, or as they are.

    Those that only the checkpoint has (a schedule's ``initial_lr``) are taken over.
    """

    def like(value: Any, now: Any) -> Any:
        return now.new_tensor(value) if torch.is_tensor(now) else tuple(value) if isinstance(now, tuple) else value

    groups = zip(saved, engine.optimizer.param_groups, strict=True)
    return [{k: like(v, now.get(k)) for k, v in group.items() if k != "params"} for group, now in groups]


def _description(engine: Engine) -> dict[str, Any]:
    """What a checkpoint and the engine that reads it have to agree on."""
    return {
        "stage": engine.stage,
        "optimizer": type(engine.optimizer).__name__,
        "parameter groups": len(engine.optimizer.param_groups),
        "alike": {name: [str(t.dtype), list(t.shape)] for name, t in engine.replicated().items()},
        "shards": {name: {"of": shard.contents} for name, shard in engine.shards().items()},
    }


def _compare_content(content: dict[str, Any], ours: dict[str, Any], subject: str) -> None:
    """ValueError that names the first thing in which checkpoint and engine differ."""
    for key in ("stage", "optimizer", "parameter groups"):
        if content[key] != ours[key]:
            raise ValueError(f"{subject} has {key} {_printable(content[key])}, this engine {ours[key]}")
    pairs = [("alike", lambda value: value), ("shards", lambda value: value and value["of"])]
    for kind, value_of in pairs:
        for name in [*content[kind], *ours[kind]]:
            theirs, mine = value_of(content[kind].get(name)), value_of(ours[kind].get(name))
            if theirs != mine:
                raise ValueError(
                    f"{subject} is of another model, bucket size or parameter groups: it has {_printable(name)} as "
                    f"{_printable(theirs)}, this engine as {_printable(mine)}"
                )


def _check_files(folder: Path, files: dict[str, Any], rank: int, ranks: int, subject: str) -> None:
    """ValueError where the folder has other files than were written; each rank reads some of them."""
    there = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(there | files.keys()):
        path = folder / Path(name).name
        if name not in there or name not in files or path.is_symlink() or not path.is_file():
            raise ValueError(f"{subject}: {_printable(name)} is missing, a link, or no file of the checkpoint")
    for name in sorted(files)[rank::ranks]:
        if _size_and_digest(folder / name) != files[name]:
            raise ValueError(f"{subject}: {name} is not the file that was written")


def _read_manifest(folder: Path) -> tuple[str, dict[str, Any]]:
    """The name of the folder that holds a whole checkpoint (``folder``'s, or the previous one's), and its content."""
    where = folder if (folder / MANIFEST).exists() else _previous(folder)
    path, subject = where / MANIFEST, f"checkpoint {where.name}: {MANIFEST}"
    if not path.exists():
        raise FileNotFoundError(f"no whole checkpoint in {folder.name}: it has no {MANIFEST}")
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{subject} is a link or a device, not a file of the folder")
    manifest: Any = None
    with suppress(ValueError, RecursionError):  # no JSON, no UTF-8, nested without end
        manifest = json.loads(path.read_bytes())
    if isinstance(manifest, dict) and isinstance(manifest.get("content"), dict) and manifest.get("format") != FORMAT:
        other = _printable(manifest.get("format"))
        raise ValueError(f"{subject} is of format {other}, here {FORMAT} is read: save a new one")
    if not isinstance(manifest, dict) or manifest.get("sha256") != _digest(manifest.get("content")):
        raise ValueError(f"{subject} is not the file that was written")
    return where.name, manifest["content"]


def _run(kind: type[Exception], subject: str, exchange: Callable[[], object]) -> None:
    """An exchange of torch's, whose error on any rank becomes one line on all."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        exchange()
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise kind(f"{subject}: rank {rank}: {_line(reason)}") from None


def _previous(folder: Path) -> Path:
    """Where the checkpoint that is being replaced waits until the new one has its name."""
    return folder.with_name(folder.name + ".previous")


def _size_and_digest(path: Path) -> list[Any]:
    with path.open("rb") as opened:
        return [path.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest()]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _line(error: BaseException) -> str:
    return _printable(project.first_line(f"{type(error).__name__}: {error}"))


def _printable(value: Any) -> str:
    """A value in one line, of which a terminal prints every character."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
