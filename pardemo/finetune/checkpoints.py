"""Checkpoints of a run: where it begins, anew or at the newest that is whole, ours and of the same run; what is kept.

A checkpoint is whole and ours where its signature says so (:mod:`pardemo.signed_folders`). One of another number of
ranks is read in DeepSpeed's universal form.
"""

import contextlib
import errno
import hashlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pardemo import project, signed_folders
from pardemo.baichuan2.checkpoints import find_shards
from pardemo.finetune.recipe import RENAMED, Recipe, locate, to_dict
from pardemo.tables import amount

T = TypeVar("T")
#: What a resumed run may change when it is named: it holds from the next step on. Everything else is in the states of
#: a checkpoint (the learning rate, the optimizer's settings), or decides what they mean (the shapes of the adapter).
CHANGEABLE = (
    "lora.lora_alpha", "lora.lora_dropout", "train.max_grad_norm", "train.max_steps", "train.num_train_epochs",
    "train.warmup_steps",
)  # fmt: skip
#: What it may change without a word; batch and accumulation are compared as the samples of a step.
FREE = {
    "activation_checkpointing", "early_stopping_patience", "eval_steps", "gradient_accumulation_steps",
    "logging_steps", "per_device_train_batch_size", "save_steps", "save_total_limit",
}  # fmt: skip
OTHERWISE = "give another output_dir"
UNIVERSAL = "-universal-"  # in the name of a checkpoint's universal form
#: What the system, torch and safetensors say where the system does not take all of a file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SIGNS = ("inline_container", *(f"os error {number}" for number in NO_ROOM))


def folders(run: Path) -> list[Path]:
    """The checkpoint folders of a run, the newest first."""
    named = [path for path in run.glob("checkpoint-*") if path.is_dir() and re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(named, key=lambda path: -int(path.name.rpartition("-")[2]))


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that may be read, and a line for each newer one that may not."""
    notes: list[str] = []
    for folder in folders(run):
        if (reason := signed_folders.fault(folder)) is None:
            return folder, notes
        notes.append(f"{folder.name} is passed over: {reason}")
    return None, notes


def remove_oldest(run: Path, limit: int | None) -> None:
    """Removes the oldest of a run's checkpoints beyond ``limit``, and what was never finished.

    Of what is signed and cannot be read nothing is counted and nothing removed: it is not known whose work it holds.
    """
    unfinished = [folder for folder in folders(run) if not (folder / signed_folders.SIGNATURE).is_file()]
    readable = [folder for folder in folders(run) if limit is not None and signed_folders.fault(folder) is None]
    for folder in [*readable[limit:], *unfinished]:
        shutil.rmtree(folder)


def fingerprint(job: Recipe) -> dict[str, Any]:
    """Returns the settings that decide over a step's samples and results: a resumed run has to have the same."""
    data, train, engine = job.data, to_dict(job.train), job.deepspeed
    if job.train.max_steps:
        train["num_train_epochs"] = None  # max_steps ends the run and its schedule
    with open(locate(data.train), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "samples a step": job.step_samples,
        "data.train": digest,
        **{f"data.{name}": getattr(data, name) for name in ("max_samples", "cutoff_len", "packing", "group_by_length")},
        "the base model": _weights(job),
        **{f"lora.{name}": value for name, value in to_dict(job.lora).items()},
        **{f"train.{name}": value for name, value in train.items() if name not in FREE},
        "DeepSpeed's stage": None if engine is None else job.zero_stage,
        "deepspeed.optimizer": None if engine is None else engine.get("optimizer"),
    }


def from_rank_0(make: Callable[[], T]) -> T:
    """Runs ``make`` on rank 0; returns its result, or raises its error, on all ranks. Collective."""
    shared: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            shared[0] = make()
        except (ValueError, RuntimeError, OSError) as error:
            shared[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise shared[1]
    return shared[0]


@contextlib.contextmanager
def only_run(run: Path) -> Iterator[None]:
    """In the block no other run writes to the folder: rank 0 holds it, and all ranks are refused alike. Collective.

    Raises:
        ValueError: another run writes there; OSError: the folder cannot be made.
    """
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            run.mkdir(parents=True, exist_ok=True)
            stack.callback(_remove_empty, run)  # nothing is left of a run that is refused
            stack.enter_context(project.only_writer(run, OTHERWISE))

        from_rank_0(hold)
        yield


def refuse_in_use(run: Path) -> None:
    """Raises ValueError where another run writes to the folder now; holds nothing itself."""
    if (run / project.LOCK).exists():
        with project.only_writer(run, OTHERWISE):
            pass


def choose_checkpoint(
    run: Path, job: Recipe, resume: bool, overwrite: bool, allow: Collection[str] = ()
) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, None where the run begins anew; and what a user should know. Changes nothing.

    Raises:
        ValueError: an earlier run is in the way; none of its checkpoints can be read; the newest that can is of other
            data, batch or settings than ``job``, and they are not in ``allow``.
    """
    if resume and overwrite:
        raise ValueError("--resume goes on with an earlier run, --overwrite removes it: give one of them")
    if allow and not resume:
        raise ValueError("--allow names what a resumed run may change: it goes with --resume")
    if unknown := [name for name in allow if name not in CHANGEABLE]:
        raise ValueError(f"--allow {unknown[0]}: a resumed run may change {', '.join(CHANGEABLE)}")
    earlier = _of_earlier_run(run)
    if not resume:
        if earlier and not overwrite:
            raise ValueError(f"{run} holds an earlier run ({earlier[0].name}): --resume goes on with it, --overwrite "
                             "removes it")  # fmt: skip
        return None, []
    start, notes = newest(run)
    if start is not None:
        return start, [*notes, f"going on from {start.name}", *_refuse_changed(start, fingerprint(job), allow)]
    if notes:
        raise ValueError(f"{run} has no checkpoint that can be read ({'; '.join(notes)}): --overwrite removes "
                         "them and begins anew, another output_dir leaves them as they are")  # fmt: skip
    if earlier:
        raise ValueError(f"{run} holds an adapter and no checkpoint to go on from: --overwrite removes it and begins "
                         "anew")  # fmt: skip
    return None, [f"no checkpoint in {run}: from the beginning"]


def begin_run(
    run: Path, job: Recipe, resume: bool, overwrite: bool, allow: Collection[str] = ()
) -> tuple[Path | None, list[str]]:
    """Chooses the checkpoint on rank 0 for all (:func:`choose_checkpoint`), and makes the run's folder ready.

    What ``overwrite`` is for is removed; a checkpoint of another number of ranks is converted. Collective.

    Raises:
        ValueError: on all ranks, in one line; see :func:`choose_checkpoint`.
        RuntimeError: another host does not see the checkpoint that rank 0 verified.
    """

    def ready() -> tuple[Path | None, list[str], dict[str, str]]:
        start, notes = choose_checkpoint(run, job, resume, overwrite, allow)
        killed = run.glob(f".checkpoint-*{UNIVERSAL}*")  # what a killed run left
        for path in (*killed, *(_of_earlier_run(run) if overwrite else ())):
            shutil.rmtree(path, ignore_errors=True)
        if start is None:
            return None, notes, {}
        before, ranks = signed_folders.about(start)["ranks"], job.world.ranks
        if job.deepspeed is not None and before != ranks:
            notes.append(f"written by {before} ranks, read by {ranks}: through DeepSpeed's universal checkpoint")
            start = convert_checkpoint(start)
        return start, notes, signed_folders.checksums(start)

    start, notes, checksums = from_rank_0(ready)
    first_of_other_host = dist.is_initialized() and dist.get_rank() and os.environ.get("LOCAL_RANK") == "0"
    compared = start if first_of_other_host else None
    if compared is not None and not (compared.is_dir() and signed_folders.checksums(compared) == checksums):
        raise RuntimeError(f"{start} is not here what it is on the first host: output_dir has to be shared by all "
                           "hosts")  # fmt: skip
    return start, notes


def convert_checkpoint(checkpoint: Path, timeout_s: float = 500) -> Path:
    """Writes a universal form into a new folder beside a checkpoint, which has to be a verified one; returns it.

    DeepSpeed's own tool merges the ranks' shards into one file per parameter and state; what it needs to be told is
    that an adapter's checkpoint lacks the frozen parameters. Scheduler and Trainer states are taken as they are; the
    ranks' random states are not: another number of ranks draws other dropout masks.

    The caller removes the folder when it has been read. The other ranks wait meanwhile, for ten minutes at most.

    Raises:
        RuntimeError: DeepSpeed's tool failed, or took longer than ``timeout_s``.
    """
    target = Path(tempfile.mkdtemp(prefix=f".{checkpoint.name}{UNIVERSAL}", dir=checkpoint.parent))
    states = (checkpoint / "latest").read_text("utf-8").strip()
    command = [
        sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
        "--input_folder", str(checkpoint / states), "--output_folder", str(target / states),
        "--num_extract_workers", "1", "--num_merge_workers", "1",
    ]  # fmt: skip
    of_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # it is no rank of this job
    environment = {name: value for name, value in os.environ.items() if name not in of_rank}
    environment.setdefault("DS_ACCELERATOR", "cpu")
    try:
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=True)
    except subprocess.SubprocessError as error:
        shutil.rmtree(target)
        last = (str(getattr(error, "stderr", None) or "").strip().splitlines() or [str(error)])[-1]
        raise RuntimeError(f"DeepSpeed could not convert {checkpoint.name}: {last}") from None
    for path in checkpoint.iterdir():
        if path.is_file() and not path.name.startswith(("rng_state", "latest")):
            shutil.copy2(path, target / path.name)
    for name in ("latest", "latest_universal"):
        (target / name).write_text(states, encoding="utf-8")
    return target


def trained_bytes(model: torch.nn.Module, bytes_per_value: int) -> int:
    """Bytes of every value that is trained: under ZeRO-3 a rank holds a shard of each parameter."""
    return bytes_per_value * sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def why_not_written(error: Exception, part: Path, nbytes: int) -> str:
    """One line that says why ``part``, a folder that takes about ``nbytes``, was not written.

    What the error says; where there is no room, which libraries tell as ``enforce fail at inline_container``, also the
    bytes that are needed, those that there are, and the limit of a file.
    """
    if getattr(error, "errno", None) not in NO_ROOM and not any(sign in str(error) for sign in SIGNS):
        return project.first_line(error) or type(error).__name__
    folder = next(path for path in (part.absolute(), *part.absolute().parents) if path.exists())
    room = f"{amount(shutil.disk_usage(folder).free + folder_bytes(part), 1)} are left for it on its disk"
    longest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = "" if longest == resource.RLIM_INFINITY else f", a file may have {amount(longest, 1)} (ulimit -f)"
    return f"no room: it takes about {amount(nbytes, 1)}, {room}{limit}"


def _of_earlier_run(run: Path) -> list[Path]:
    """Checkpoints and the adapter that a run's folder holds."""
    return [path for path in (*folders(run), run / "adapter") if path.exists()]


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _refuse_changed(start: Path, now: dict[str, Any], allow: Collection[str]) -> list[str]:
    """A line for each allowed change of what the checkpoint was written with."""
    before = dict(signed_folders.about(start)["run"])
    if precision := before.pop("train.precision", None):  # of pardemo 0.1, as all of RENAMED
        before |= {"train.bf16": precision == "bf16", "train.fp16": precision == "fp16"}
    before = {RENAMED.get(name, name): value for name, value in before.items()}
    pairs = {name: (value, now[name]) for name, value in before.items() if value != now[name]}
    changed = {name: f"{name} {value}, this run has {new}" for name, (value, new) in pairs.items()}
    if refused := [name for name in changed if name not in allow]:
        hint = ""
        if "samples a step" in refused:
            hint = " (train.gradient_accumulation_steps makes up for another number of ranks)"
        elif set(refused) <= set(CHANGEABLE):
            hint = f": {' '.join(f'--allow {name}' for name in refused)} goes on with it, where that is meant"
        raise ValueError(f"{start.name} was written with {'; '.join(changed[name] for name in refused)}{hint}")
    return [f"{start.name} was written with {change}, as allowed" for change in changed.values()]


def _weights(job: Recipe) -> str:
    """Which base model it is: its configuration and, of each shard, the size and both ends: never 27 GB read whole."""
    folder, end = locate(job.model.path), 1 << 20
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in find_shards(folder):
        size = path.stat().st_size
        with open(path, "rb") as file:
            digest.update(f"{size}".encode() + file.read(end))
            file.seek(max(0, size - end))
            digest.update(file.read(end))
    return digest.hexdigest()[:16]
