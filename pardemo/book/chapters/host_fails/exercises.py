"""The exercises of this chapter, and what checks an answer to each."""

import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pardemo.book.chapters.host_fails.measurements import killing_at
from pardemo.book.page.exercises import TIMEOUT_S, Mistake, exercise, formula
from pardemo.formulas import failures
from pardemo.world import World
from pardemo.world.errors import RankDied

NUMBERS = 2**18  # of a state: 1 MiB


def _resharded(draw: random.Random) -> Iterator[tuple[int, int, int, int]]:
    sizes = [(12, 4, 3), (12, 4, 2), (10, 4, 3), (8, 2, 4)]
    sizes += [(draw.randint(20, 60), draw.randint(2, 6), draw.randint(2, 6)) for _ in range(4)]
    return ((rows, before, now, rank) for rows, before, now in sizes for rank in range(now))


@formula(_resharded, "Right: each row once, from the shard that has it.", asked="a list of (shard, begin, end)")
def check_reads(rows: int, before: int, now: int, rank: int):
    """Checks what the rank reads: ``(shard, begin, end)`` of each piece, in order."""
    right = [tuple(read) for read in failures.resharded(rows, before, now, rank)]
    each = -(-rows // before)
    return right, [
        (
            [(shard, begin - shard * each, end - shard * each) for shard, begin, end in right],
            "begin and end count the rows of the whole tensor, not those of the shard",
        ),
        (
            lambda pieces: [tuple(piece) for piece in pieces if piece[1] < piece[2]] == right,
            "a shard from which nothing is read does not belong into the list",
        ),
        (lambda pieces: sorted(map(tuple, pieces)) == right, "in the order of the shards"),
        (lambda pieces: len(pieces) < len(right), "a new shard may lie across cuts of the old ones"),
        (lambda _: True, f"torch.chunk gives each rank {each} rows, and the last ones what is left"),
    ]


def check_save(function: Callable[[dict[str, Any], Path], None]) -> str:
    """``function(state, path)`` writes a state so that ``path`` is the old or the new one, whenever it is killed."""
    with tempfile.TemporaryDirectory() as folder, World(1, timeout_s=TIMEOUT_S) as world:
        path = Path(folder) / "state.pt"
        for nbytes in (0, 1000, 2**19, 4 * NUMBERS, None):
            for file in Path(folder).iterdir():
                file.unlink()
            torch.save(_state(1), path)
            try:
                problem = world.run(_try_save, function, path, nbytes)[0]
            except RankDied as died:
                if died.deaths != {0: -signal.SIGXFSZ}:
                    raise
                problem = ""
            when, step = ("Without a failure", 2) if nbytes is None else (f"Killed after {nbytes:,} bytes", 1)
            if problem := problem or _of_saved(path, step):
                raise Mistake(f"{when}, {problem}")
        if rest := sorted(file.name for file in Path(folder).iterdir() if file != path):
            raise Mistake(f"The new state is there, but {', '.join(rest)} is left over: rename it.")
    return "Right: killed at any byte, there is a whole state, and the new one takes the old one's place at once."


def _state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((NUMBERS,), float(step))}


def _try_save(function: Callable, path: Path, nbytes: int | None) -> str:
    """Saves the second state, in a process that the kernel ends when a file is larger than so many bytes."""
    if nbytes is None:
        function(_state(2), path)
        return ""
    with killing_at(nbytes):
        function(_state(2), path)
    return "it would write on: it wrote less than the state has. Does it save all of it?"


def _of_saved(path: Path, step: int) -> str:
    """What is wrong with the saved file, which should hold the state of that step."""
    if not path.exists():
        return "there is no file: the old one has to stay until the new one is whole."
    try:
        saved = torch.load(path, weights_only=True)
        right = saved["step"] == step and torch.equal(saved["weights"], _state(step)["weights"])
    except Exception as error:
        return f"the file at path cannot be read ({type(error).__name__}): it is half of a state."
    return "" if right else f"the file at path has step {saved['step']}, not step {step}."


def _jobs(draw: random.Random) -> Iterator[tuple[float, float, float, int]]:
    yield from ((10.0, 30.0, 1.8e8, 16_384), (2.0, 60.0, 1.8e8, 1024), (60.0, 0.01, 1e8, 4096))
    for _ in range(3):
        yield draw.uniform(1, 20), draw.uniform(5, 90), 1.8e8, 2 ** draw.randint(7, 13)


@formula(_jobs, "Right: four times the GPUs, half of the interval.", unit="steps", rel=0.01, abs=0.99)  # whole steps
def check_steps(step_s: float, save_s: float, gpu_s: float, gpus: int):
    """After how many steps to save, by Young's interval."""
    between = failures.between_failures(gpu_s, gpus)
    exact = failures.young_interval(save_s, between) / step_s
    return max(1, round(exact)), [
        (0, "a job cannot save before a step: at least 1"),
        (exact * step_s, "that is in seconds: divide by those of a step"),
        (
            failures.young_interval(save_s, gpu_s) / step_s,
            "that is for one GPU: a job stops when any of its GPUs fails",
        ),
        (exact / 2**0.5, "the 2 under the root is missing"),
        (exact * exact * step_s, "the root is missing"),
        (lambda _: True, "w = √(2·δ·μ), and μ is that of one GPU divided by the GPUs"),
    ]


@exercise("reads")
def my_reads(rows, before, now, rank):
    """First find the rows that the rank wants. Then go through the old shards: which of these rows does each have?"""
    old, new = -(-rows // before), -(-rows // now)  # rows of a shard, rounded up
    first, last = min(rank * new, rows), min((rank + 1) * new, rows)
    pieces = []
    for shard in range(before):
        begin, end = max(first, shard * old), min(last, (shard + 1) * old)
        if begin < end:
            pieces.append((shard, begin, end))
    return pieces


@exercise("save")
def my_save(state, path):
    """What must not happen to the old file until the new one is whole, and which one operation puts the one into the
    place of the other?"""
    beside = path.with_suffix(".new")  # in the same folder: a rename goes nowhere else
    with open(beside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@exercise("steps")
def my_steps(step_s, save_s, gpu_s, gpus):
    """A job stops when any of its GPUs fails. And Young's interval is in seconds: how many steps fit into it?"""
    between_s = gpu_s / gpus  # any of them stops the job
    interval = (2 * save_s * between_s) ** 0.5
    return max(1, round(interval / step_s))
