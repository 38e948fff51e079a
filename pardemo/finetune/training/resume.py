"""Where a run begins: anew, or at the newest checkpoint that is whole, ours, and of the same run."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pardemo import project
from pardemo.baichuan2.checkpoints import find_shards
from pardemo.finetune.recipes import recipe
from pardemo.finetune.recipes.recipe_schema import Recipe
from pardemo.finetune.training import checkpoint_seal, universal_checkpoint

#: What a resumed run may change when it is named: it holds from the next step on. Everything else is in the states of
#: a checkpoint (the learning rate, the optimizer's settings), or decides what they mean (the shapes of the adapter).
CHANGEABLE = (
    "lora.alpha", "lora.dropout", "train.epochs", "train.max_grad_norm", "train.max_steps", "train.warmup_steps",
)  # fmt: skip


OTHERWISE = "give another output_dir"


def fingerprint(job: Recipe, ranks: int) -> dict[str, Any]:
    """What decides which samples a step sees and what it makes of them: it has to be the same before and after."""
    data, train, lora, engine = job.data, job.train, job.lora, job.deepspeed
    return {
        "samples a step": train.per_device_batch * train.accumulation * ranks,
        "data.train": _checksum(recipe.locate(data.train)),
        "data.max_samples": data.max_samples,
        "data.cutoff_len": data.cutoff_len,
        "data.packing": data.packing,
        "data.group_by_length": data.group_by_length,
        "train.seed": train.seed,
        "the base model": _weights(job),
        "lora.rank": lora.rank,
        "lora.alpha": lora.alpha,
        "lora.dropout": lora.dropout,
        "lora.target": list(lora.target),
        "train.learning_rate": train.learning_rate,
        "train.scheduler": train.scheduler,
        "train.warmup_steps": train.warmup_steps,
        "train.epochs": None if train.max_steps else train.epochs,  # max_steps ends the run and its schedule
        "train.max_steps": train.max_steps,
        "train.max_grad_norm": train.max_grad_norm,
        "train.precision": train.precision,
        "DeepSpeed's stage": None if engine is None else engine.get("zero_optimization", {}).get("stage", 0),
        "deepspeed.optimizer": None if engine is None else engine.get("optimizer"),
    }


@contextlib.contextmanager
def only_run(run: Path, rank: int) -> Iterator[None]:
    """In the block no other run writes to the folder: rank 0 holds it, and all ranks are refused alike. Collective.

    Raises:
        ValueError: another run writes there; OSError: the folder cannot be made.
    """
    refusal: list[Any] = [None]
    with contextlib.ExitStack() as stack:
        if rank == 0:
            try:
                run.mkdir(parents=True, exist_ok=True)
                stack.callback(_remove_empty, run)  # nothing is left of a run that is refused
                stack.enter_context(project.only_writer(run, OTHERWISE))
            except (ValueError, OSError) as error:
                refusal[0] = error
        if dist.is_initialized():
            dist.broadcast_object_list(refusal, src=0)
        if refusal[0] is not None:
            raise refusal[0]
        yield


def refuse_in_use(run: Path) -> None:
    """Raises ValueError where another run writes to the folder now; holds nothing itself."""
    if (run / project.LOCK).exists():
        with project.only_writer(run, OTHERWISE):
            pass


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def refuse_occupied(run: Path) -> None:
    """Raises ValueError where an earlier run's checkpoints or adapter would be lost or mistaken for the new one's."""
    if leftovers := [path.name for path in (*checkpoint_seal.checkpoints(run), run / "adapter") if path.exists()]:
        raise ValueError(
            f"{run} holds an earlier run ({leftovers[0]}): --resume goes on with it, --overwrite removes it"
        )


def choose(
    run: Path, job: Recipe, resume: bool, overwrite: bool, ranks: int, allow: Collection[str] = ()
) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, None where the run begins anew; and what a user should know. Changes nothing.

    Raises:
        ValueError: an earlier run is in the way; none of its checkpoints can be read; the newest that can is of other
            data, batch or settings than ``job``, and they are not in ``allow``.
    """
    if resume and overwrite:
        raise ValueError("--resume goes on with an earlier run, --overwrite removes it: give one of them")
    _refuse_unknown(allow, resume)
    if not resume:
        if not overwrite:
            refuse_occupied(run)
        return None, []
    start, passed_over = checkpoint_seal.newest(run)
    if start is None:
        _refuse_unreadable(run, passed_over)
        return None, [f"no checkpoint in {run}: from the beginning"]
    changed = _refuse_changed(start, fingerprint(job, ranks), allow)
    return start, [*passed_over, f"going on from {start.name}", *changed]


def begin(
    run: Path, job: Recipe, resume: bool, overwrite: bool, rank: int, size: int, allow: Collection[str] = ()
) -> tuple[Path | None, list[str]]:
    """:func:`choose` by rank 0, broadcast to all, with the folder made ready: what ``overwrite`` is for is removed, a
    checkpoint of another number of ranks is converted.

    Raises:
        ValueError: on all ranks, in one line; see :func:`choose`.
        RuntimeError: another host does not see the checkpoint that rank 0 verified.
    """
    shared: list[Any] = [None, [], None, None]  # checkpoint, notes, its checksums, an error
    if rank == 0:
        try:
            start, shared[1] = choose(run, job, resume, overwrite, size, allow)
            shared[0], shared[2] = _make_ready(run, job, start, overwrite, size, shared[1])
        except (ValueError, RuntimeError, OSError) as error:
            shared[3] = error
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    start, notes, files, error = shared
    if error is not None:
        raise error
    if (
        start is not None
        and rank
        and os.environ.get("LOCAL_RANK") == "0"
        and not checkpoint_seal.same_here(start, files)
    ):
        raise RuntimeError(
            f"{start} is not here what it is on the first host: output_dir has to be shared by all hosts"
        )
    return start, notes


def _make_ready(
    run: Path, job: Recipe, start: Path | None, overwrite: bool, size: int, notes: list[str]
) -> tuple[Path | None, dict[str, str] | None]:
    universal_checkpoint.remove_left(run)
    if overwrite:
        for path in (*checkpoint_seal.checkpoints(run), run / "adapter"):
            shutil.rmtree(path, ignore_errors=True)
    if start is None:
        return None, None
    before = checkpoint_seal.about(start)["ranks"]
    if job.deepspeed is not None and before != size:
        notes.append(f"written by {before} ranks, read by {size}: through DeepSpeed's universal checkpoint")
        start = universal_checkpoint.convert(start)
        return start, checkpoint_seal.checksums(start)
    return start, checkpoint_seal.files(start)


def _refuse_unknown(allow: Collection[str], resume: bool) -> None:
    if allow and not resume:
        raise ValueError("--allow names what a resumed run may change: it goes with --resume")
    for name in allow:
        if name not in CHANGEABLE:
            raise ValueError(f"--allow {name}: a resumed run may change {', '.join(CHANGEABLE)}")


def _refuse_unreadable(run: Path, passed_over: list[str]) -> None:
    if passed_over:
        raise ValueError(f"{run} has no checkpoint that can be read ({'; '.join(passed_over)}): --overwrite removes "
                         "them and begins anew, another output_dir leaves them as they are")  # fmt: skip
    if (run / "adapter").exists():
        raise ValueError(f"{run} holds an adapter and no checkpoint to go on from: --overwrite removes it and begins "
                         "anew")  # fmt: skip


def _refuse_changed(start: Path, now: dict[str, Any], allow: Collection[str]) -> list[str]:
    """A line for each allowed change of what the checkpoint was written with."""
    before = checkpoint_seal.about(start)["run"]
    changed = {name: f"{name} {before[name]}, this run has {now[name]}" for name in before if before[name] != now[name]}
    if refused := [name for name in changed if name not in allow]:
        hint = ""
        if "samples a step" in refused:
            hint = " (train.accumulation and per_device_batch make up for another number of ranks)"
        elif set(refused) <= set(CHANGEABLE):
            hint = f": {' '.join(f'--allow {name}' for name in refused)} goes on with it, where that is meant"
        raise ValueError(f"{start.name} was written with {'; '.join(changed[name] for name in refused)}{hint}")
    return [f"{start.name} was written with {change}, as allowed" for change in changed.values()]


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights(job: Recipe) -> str:
    """Which base model it is: its configuration and, of each shard, the size and both ends: never 27 GB read whole."""
    folder, end = recipe.locate(job.model.path), 1 << 20
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in find_shards(folder) if job.model.init == "pretrained" else ():
        size = path.stat().st_size
        with open(path, "rb") as file:
            digest.update(f"{size}".encode() + file.read(end))
            file.seek(max(0, size - end))
            digest.update(file.read(end))
    return digest.hexdigest()[:16]
