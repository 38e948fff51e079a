"""A run that outlives who started it: its own session, its log in a file. Closing a notebook does not end it."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from pardemo import project
from pardemo.finetune.recipes import recipe
from pardemo.finetune.recipes.recipe_schema import Recipe

OUTPUT, PID = "finetune.out", "finetune.pid"


def start(job: Recipe, resume: bool = False, overwrite: bool = False, allow: Sequence[str] = ()) -> int:
    """Starts ``pardemo finetune`` in a session of its own and returns its process id.

    What it prints goes to ``finetune.out`` in the recipe's output folder. To end it: :func:`stop`.

    Raises:
        ValueError, FileNotFoundError: what :func:`~.launch.check` finds; nothing is started then.
        RuntimeError: a run of this folder is at work already.
    """
    from pardemo.finetune.training.launch import check

    run = recipe.locate(job.output_dir)
    _refuse_running(run)  # how to follow or stop it, before the check says that the folder is in use
    check(job, resume, overwrite, allow)
    run.mkdir(parents=True, exist_ok=True)
    with open(run / ".start.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _start(job, run, resume, overwrite, allow)


def _start(job: Recipe, run: Path, resume: bool, overwrite: bool, allow: Sequence[str]) -> int:
    _refuse_running(run)
    recipe.save(job, run / "recipe.yaml")
    command = [
        sys.executable,
        "-m",
        "pardemo.finetune",
        str(run / "recipe.yaml"),
        *(["--resume"] * resume),
        *(["--overwrite"] * overwrite),
        *(part for key in allow for part in ("--allow", key)),
    ]
    with open(run / OUTPUT, "ab" if resume else "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})  # fmt: skip
    born = psutil.Process(process.pid).create_time()  # an id alone is used again one day
    project.write_json(run / PID, {"pid": process.pid, "born": born})
    return process.pid


def _refuse_running(run: Path) -> None:
    if running(run):
        raise RuntimeError(f"a run is at work in {run}: follow() or stop() it")


def running(run: Path) -> bool:
    """Whether the run of a folder is at work."""
    return _process(run) is not None


def follow(run: Path, seconds: float = 60.0) -> Iterator[str]:
    """Lines of the run's output as they come, from the beginning, for ``seconds`` or until it ends."""
    until = time.monotonic() + seconds
    with open(run / OUTPUT, encoding="utf-8", errors="replace") as file:
        while True:
            at_work = running(run)  # before reading: what is written between is read in the next turn
            place, line = file.tell(), file.readline()
            if line.endswith("\n") or (line and not at_work):
                yield line.rstrip("\n")
            else:
                file.seek(place)  # half a line: once more when the rest is there
                if not at_work:
                    return
                time.sleep(0.2)
            if time.monotonic() > until:
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


def _process(run: Path) -> psutil.Process | None:
    try:
        record = json.loads((run / PID).read_text("utf-8"))
        process = psutil.Process(record["pid"])
        alive = abs(process.create_time() - record["born"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None
    return process if alive else None
