"""A checkpoint of one number of ranks for another: DeepSpeed's universal form."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MARK = "-universal-"


def is_universal(folder: Path) -> bool:
    return MARK in folder.name


def remove_left(run: Path) -> None:
    """Removes the universal forms that a killed run left in its folder."""
    for folder in run.glob(f".checkpoint-*{MARK}*"):
        shutil.rmtree(folder, ignore_errors=True)


def convert(checkpoint: Path, timeout_s: float = 500) -> Path:
    """Writes a universal form into a new folder beside a checkpoint, which has to be a verified one; returns it.

    DeepSpeed's own tool merges the ranks' shards into one file per parameter and state; what it needs to be told is
    that an adapter's checkpoint lacks the frozen parameters. Scheduler and Trainer states are taken as they are; the
    ranks' random states are not: another number of ranks draws other dropout masks.

    The caller removes the folder when it has been read. The other ranks wait meanwhile, for ten minutes at most.

    Raises:
        RuntimeError: DeepSpeed's tool failed, or took longer than ``timeout_s``.
    """
    target = Path(tempfile.mkdtemp(prefix=f".{checkpoint.name}{MARK}", dir=checkpoint.parent))
    states = (checkpoint / "latest").read_text("utf-8").strip()
    command = [
        sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
        "--input_folder", str(checkpoint / states), "--output_folder", str(target / states),
        "--num_extract_workers", "1", "--num_merge_workers", "1",
    ]  # fmt: skip
    environment = {**os.environ, "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # it is no rank of this job
    try:
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        shutil.rmtree(target)
        raise RuntimeError(f"converting {checkpoint.name} took longer than {timeout_s:g} s") from None
    if process.returncode:
        shutil.rmtree(target)
        last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"DeepSpeed could not convert {checkpoint.name}: {last}")
    for path in checkpoint.iterdir():
        if path.is_file() and not path.name.startswith(("rng_state", "latest")):
            shutil.copy2(path, target / path.name)
    for name in ("latest", "latest_universal"):
        (target / name).write_text(states, encoding="utf-8")
    return target
