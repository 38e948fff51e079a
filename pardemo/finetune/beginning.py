"""Where a run begins: anew, or at the newest checkpoint that is whole, ours, and of the same run."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pardemo.finetune import recipe, sealed, universal
from pardemo.finetune.recipe_schema import Recipe


def fingerprint(job: Recipe, ranks: int) -> dict[str, Any]:
    """What decides which samples a step sees: a checkpoint of another has no place to go on from."""
    data, train = job.data, job.train
    with open(recipe.locate(data.train), "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "samples a step": train.per_device_batch * train.accumulation * ranks,
        "data.train": checksum,
        "data.max_samples": data.max_samples,
        "data.cutoff_len": data.cutoff_len,
        "data.packing": data.packing,
        "data.group_by_length": data.group_by_length,
        "train.seed": train.seed,
    }


def occupied(run: Path) -> str | None:
    """What an earlier run left in the folder, by name; None where a new one may begin."""
    found = [path.name for path in (*sealed.checkpoints(run), run / "adapter") if path.exists()]
    return found[0] if found else None


def refuse_occupied(run: Path) -> None:
    """Raises ValueError where an earlier run's checkpoints or adapter would be lost or mistaken for the new one's."""
    if (found := occupied(run)) is not None:
        raise ValueError(f"{run} holds an earlier run ({found}): --resume goes on with it, --overwrite removes it")


def begin(run: Path, job: Recipe, resume: bool, overwrite: bool, rank: int, size: int) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, found by rank 0 and told to all; and what a user should know.

    Raises:
        ValueError: on all ranks, in one line: an earlier run is in the way, or the checkpoint is of other data, batch
            or seed.
        RuntimeError: another host does not see the checkpoint that rank 0 verified.
    """
    told: list[Any] = [None, [], None, None]  # checkpoint, notes, its checksums, an error
    if rank == 0:
        try:
            told[:3] = _find(run, job, resume, overwrite, size)
        except (ValueError, RuntimeError, OSError) as error:
            told[3] = error
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    start, notes, files, error = told
    if error is not None:
        raise error
    if start is not None and rank and os.environ.get("LOCAL_RANK") == "0" and not sealed.same_here(start, files):
        raise RuntimeError(
            f"{start} is not here what it is on the first host: output_dir has to be shared by all hosts"
        )
    return start, notes


def _find(run: Path, job: Recipe, resume: bool, overwrite: bool, size: int) -> tuple:
    if resume and overwrite:
        raise ValueError("--resume goes on with an earlier run, --overwrite removes it: give one of them")
    if overwrite:
        for path in (*sealed.checkpoints(run), run / "adapter"):
            shutil.rmtree(path, ignore_errors=True)
    if not resume:
        refuse_occupied(run)
        return None, [], None
    start, notes = sealed.newest(run)
    if start is None:
        return None, [*notes, f"no checkpoint in {run}: from the beginning"], None
    notes.append(f"going on from {start.name}")
    about, now = sealed.about(start), fingerprint(job, size)
    for name, before in about["run"].items():
        if before != now[name]:
            hint = " (train.accumulation and per_device_batch make up for another number of ranks)" * (
                " a step" in name
            )
            raise ValueError(f"{start.name} was written with {name} {before}, this run has {now[name]}{hint}")
    if job.deepspeed is not None and about["ranks"] != size:
        notes.append(f"written by {about['ranks']} ranks, read by {size}: through DeepSpeed's universal checkpoint")
        start = universal.convert(start)
        return start, notes, sealed.checksums(start)
    return start, notes, sealed.files(start)
