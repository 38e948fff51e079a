"""Starting a fine-tune on ranks of this machine: checked, then run here, or in a session that outlives who started it.

:func:`start` runs it in the background: closing a notebook does not end it, :func:`follow` shows what it prints.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pardemo import project
from pardemo.finetune import recipe
from pardemo.finetune.recipe import Recipe

if TYPE_CHECKING:
    from pardemo.finetune.train import TrainingResult

#: A run may take weeks. A hang inside it ends with the process group's own limit: half an hour, ten minutes in a
#: launcher's job.
LONGEST_S = 3.0e7
PRELOAD = ("pardemo.peers.deepspeed.engine", "pardemo.finetune.train")
OUTPUT, PID = "finetune.out", "finetune.pid"


def launch(job: Recipe, resume: bool = False, overwrite: bool = False, allow: Sequence[str] = ()) -> "TrainingResult":
    """Trains on ``job.world.ranks`` ranks of this machine. What rank 0 prints appears here.

    Args:
        resume, overwrite, allow: as in :func:`pardemo.finetune.train.train`.

    Raises:
        ValueError, FileNotFoundError: recipe, model or data are not what they should be; before any rank starts.
        RankError: a rank failed or died; nothing is left running, and ``resume`` goes on from the last checkpoint.
    """
    from pardemo import World

    on_cpu = check(job, resume, overwrite, allow)
    threads = max(1, project.available_cores() // job.world.ranks)
    env = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if on_cpu else {}
    with World(job.world.ranks, preload=PRELOAD, threads=threads, timeout_s=LONGEST_S, env=env) as world:
        return world.run(_rank, job, resume, overwrite, allow)[0]


def _rank(job: Recipe, resume: bool, overwrite: bool, allow: Sequence[str]) -> "TrainingResult":
    from pardemo.finetune.train import train

    return train(job, resume, overwrite, allow=allow)


def check(job: Recipe, resume: bool = False, overwrite: bool = False, allow: Sequence[str] = ()) -> bool:
    """What can be known without a rank: settings, folders, data, checkpoints, GPUs. Returns whether ranks will run on
    the CPU.

    They do where there is no GPU; in fp32 also where there are fewer GPUs than ranks.
    """
    import torch

    from pardemo import headlines
    from pardemo.baichuan2 import load_tokenizer
    from pardemo.baichuan2.checkpoints import find_shards, read_config
    from pardemo.finetune import checkpoints

    gpus = torch.cuda.device_count()
    on_cpu = not gpus or (gpus < job.world.ranks and job.train.precision == "fp32")
    recipe.preflight(job, on_cpu)
    if not on_cpu and gpus < job.world.ranks:
        raise ValueError(f"world.ranks is {job.world.ranks}, this machine has {gpus} GPUs: give --ranks {gpus}"
                         ", or use a launcher for several hosts")  # fmt: skip
    folder, run = recipe.locate(job.model.path), recipe.locate(job.output_dir)
    read_config(folder)
    if job.model.init == "pretrained":
        find_shards(folder)
    load_tokenizer(folder)
    for path in filter(None, (job.data.train, job.data.valid)):
        if not recipe.locate(path).is_file():
            raise FileNotFoundError(f"data: there is no file {recipe.locate(path)}")
        headlines.read(recipe.locate(path))
    checkpoints.refuse_in_use(run)
    checkpoints.choose(run, job, resume, overwrite, allow)
    return on_cpu


def needs(job: Recipe, gpus: int = 0, gpu_gb: float = 0) -> list[dict[str, Any]]:
    """Rows of ``what, needed, found, ok``: the model's folder, the data, and so many GPUs of so much memory."""
    import torch

    from pardemo.baichuan2.checkpoints import find_shards, read_config

    def row(what: str, needed: str, found: str, ok: bool) -> dict[str, Any]:
        return {"what": what, "needed": needed, "found": found, "ok": ok}

    folder = recipe.locate(job.model.path)
    try:
        read_config(folder)
        sizes = [path.stat().st_size / 1e9 for path in find_shards(folder)]
        rows = [row("model folder", job.model.path, f"{len(sizes)} files, {sum(sizes):.1f} GB", True)]
    except (ValueError, OSError) as error:
        rows = [row("model folder", job.model.path, str(error).replace(str(folder), job.model.path), False)]
    for label, path in (("training data", job.data.train), ("test data", job.data.test)):
        exists = recipe.locate(path).is_file()
        rows.append(row(label, path, "there" if exists else "no such file", exists))
    if gpus:
        sizes = [torch.cuda.get_device_properties(i).total_memory / 1e9 for i in range(torch.cuda.device_count())]
        present = f"{len(sizes)}" + (f" of {min(sizes):.0f} GB" if sizes else "")
        enough = sum(size >= 0.98 * gpu_gb for size in sizes) >= gpus  # 80 GB cards report a little less
        rows.append(row("GPUs", f"{gpus} of {gpu_gb:g} GB", present, enough))
    return rows


def start(job: Recipe, resume: bool = False, overwrite: bool = False, allow: Sequence[str] = ()) -> int:
    """Starts ``pardemo finetune`` in a session of its own and returns its process id.

    What it prints goes to ``finetune.out`` in the recipe's output folder. To end it: :func:`stop`.

    Raises:
        ValueError, FileNotFoundError: what :func:`check` finds; nothing is started then.
        RuntimeError: a run of this folder is at work already.
    """
    run = recipe.locate(job.output_dir)
    _refuse_running(run)  # how to follow or stop it, before the check says that the folder is in use
    check(job, resume, overwrite, allow)
    run.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pardemo.finetune", str(run / "recipe.yaml"), *(["--resume"] * resume)]
    command += [*(["--overwrite"] * overwrite), *(part for key in allow for part in ("--allow", key))]
    with project.only_writer(run, "follow() or stop() it"):  # of two that start at once
        _refuse_running(run)
        recipe.save(job, run / "recipe.yaml")
        with open(run / OUTPUT, "ab" if resume else "wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                       start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})  # fmt: skip
        born = psutil.Process(process.pid).create_time()  # an id alone is used again one day
        project.write_json(run / PID, {"pid": process.pid, "born": born})
    return process.pid


def running(run: Path) -> bool:
    """Whether the run that was started in a folder is at work."""
    return _process(run) is not None


def follow(run: Path, seconds: float = 60.0) -> Iterator[str]:
    """Lines of the run's output as they come, from the beginning, for ``seconds`` or until it ends."""
    until = time.monotonic() + seconds
    with open(run / OUTPUT, encoding="utf-8", errors="replace") as file:
        while time.monotonic() < until:
            at_work = running(run)  # before reading: what is written between is read in the next turn
            place, line = file.tell(), file.readline()
            if line.endswith("\n") or (line and not at_work):
                yield line.rstrip("\n")
            elif at_work:
                file.seek(place)  # half a line: once more when the rest is there
                time.sleep(0.2)
            else:
                return


def stop(run: Path, grace_s: float = 20.0) -> None:
    """Ends the run of a folder, ranks included; its last checkpoint stays."""
    process = _process(run)
    if process is None:
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(grace_s)


def _refuse_running(run: Path) -> None:
    if running(run):
        raise RuntimeError(f"a run is at work in {run}: follow() or stop() it")


def _process(run: Path) -> psutil.Process | None:
    try:
        record = json.loads((run / PID).read_text("utf-8"))
        process = psutil.Process(record["pid"])
        alive = abs(process.create_time() - record["born"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None
    return process if alive else None
