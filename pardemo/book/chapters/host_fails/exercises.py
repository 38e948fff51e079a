"""The exercises of this chapter, and what checks an answer to each."""

import os
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pardemo.book.chapters.host_fails.measurements import killing_at
from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed
from pardemo.formulas import failures
from pardemo.world import World
from pardemo.world.errors import RankDied

EXERCISES = {
    "reads": Exercise(
        "my_reads",
        "First find the rows that the rank wants. Then go through the old shards: which of these rows does each have?",
    ),
    "save": Exercise(
        "my_save",
        "What must not happen to the old file until the new one is whole, and which one operation puts the one into "
        "the place of the other?",
    ),
    "steps": Exercise(
        "my_steps",
        "A job stops when any of its GPUs fails. And Young's interval is in seconds: how many steps fit into it?",
    ),
}
TIMEOUT_S = 60
NUMBERS = 2**18  # of a state: 1 MiB
NEAR = 0.01


def check_reads(function: Callable[[int, int, int, int], list[tuple[int, int, int]]]) -> str:
    """``function(rows, before, now, rank)`` is what the rank reads: ``(shard, begin, end)`` of each piece, in order."""
    draw = random.Random(fresh_seed())
    cases = [(12, 4, 3), (12, 4, 2), (10, 4, 3), (8, 2, 4)]
    cases += [(draw.randint(20, 60), draw.randint(2, 6), draw.randint(2, 6)) for _ in range(4)]
    for rows, before, now in cases:
        for rank in range(now):
            _check_reads(call(function, rows, before, now, rank), rows, before, now, rank)
    return "Right: each row once, from the shard that has it."


def _check_reads(answer: object, rows: int, before: int, now: int, rank: int) -> None:
    where = f"For rank {rank} of {now}, of {rows} rows that {before} ranks have saved,"
    try:
        pieces = [tuple(int(number) for number in piece) for piece in answer]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise Mistake(f"{where} it returned {answer!r}, not a list of (shard, begin, end).") from None
    if any(len(piece) != 3 for piece in pieces):
        raise Mistake(f"{where} each piece should be (shard, begin, end), not {pieces}.")
    right = [tuple(read) for read in failures.resharded(rows, before, now, rank)]
    if pieces == right:
        return
    each = -(-rows // before)
    if [(shard, begin + shard * each, end + shard * each) for shard, begin, end in pieces] == right:
        hint = "begin and end count the rows of the whole tensor, not those of the shard"
    elif [piece for piece in pieces if piece[1] < piece[2]] == right:
        hint = "a shard from which nothing is read does not belong into the list"
    elif sorted(pieces) == right:
        hint = "in the order of the shards"
    elif len(pieces) < len(right):
        hint = "a new shard may lie across cuts of the old ones"
    else:
        hint = f"torch.chunk gives each rank {each} rows, and the last ones what is left"
    raise Mistake(f"{where} it should read {right}, not {pieces}: {hint}.")


def check_save(function: Callable[[dict[str, Any], Path], None]) -> str:
    """``function(state, path)`` writes a state so that ``path`` is the old or the new one, whenever it is killed."""
    with tempfile.TemporaryDirectory() as folder, World(1, timeout_s=TIMEOUT_S) as world:
        path = Path(folder) / "state.pt"
        for nbytes in (0, 1000, 2**19, 4 * NUMBERS):
            for file in Path(folder).iterdir():
                file.unlink()
            torch.save(_state(1), path)
            try:
                problem = world.run(_try_save, function, path, nbytes)[0]
            except RankDied as died:
                if died.deaths != {0: -signal.SIGXFSZ}:
                    raise
                problem = ""
            if problem:
                raise Mistake(problem)
            if not path.exists():
                raise Mistake(f"Killed after {nbytes:,} bytes, there is no file: the old one has to stay until then.")
            _check_saved(path, (1,), f"Killed after {nbytes:,} bytes, ")
        if problem := world.run(_try_save, function, path, None)[0]:
            raise Mistake(problem)
        if not path.exists():
            raise Mistake("Without a failure, there is no file at path.")
        _check_saved(path, (2,), "Without a failure, ")
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
    return "It wrote less than the state has: does it save all of it?"


def _check_saved(path: Path, steps: tuple[int, ...], when: str) -> None:
    try:
        saved = torch.load(path, weights_only=True)
        step, weights = saved["step"], saved["weights"]
    except Exception as error:
        name = type(error).__name__
        raise Mistake(f"{when}the file at path cannot be read ({name}): it is half of a state.") from None
    if step not in steps or not torch.equal(weights, torch.full((NUMBERS,), float(step))):
        raise Mistake(f"{when}the file at path has step {step}, not step {steps[0]}.")


def check_steps(function: Callable[[float, float, float, int], int]) -> str:
    """``function(step_s, save_s, gpu_s, gpus)`` is after how many steps to save, by Young's interval."""
    draw = random.Random(fresh_seed())
    cases = [(10.0, 30.0, 1.8e8, 16_384), (2.0, 60.0, 1.8e8, 1024), (60.0, 0.01, 1e8, 4096)]
    cases += [(draw.uniform(1, 20), draw.uniform(5, 90), 1.8e8, 2 ** draw.randint(7, 13)) for _ in range(3)]
    for case in cases:
        _check_steps(call(function, *case), *case)
    return "Right: four times the GPUs, half of the interval."


def _check_steps(answer: object, step_s: float, save_s: float, gpu_s: float, gpus: int) -> None:
    where = (
        f"For steps of {step_s:.2f} s, saves of {save_s:.2f} s and {gpus:,} GPUs that each fail every {gpu_s:.2g} s,"
    )
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise Mistake(f"{where} it returned {type(answer).__name__}, not a number of steps.")
    between = failures.between_failures(gpu_s, gpus)
    exact = failures.young_interval(save_s, between) / step_s
    if abs(answer - max(1.0, exact)) <= max(1.0, NEAR * exact) and answer >= 1:
        return
    alone = failures.young_interval(save_s, gpu_s) / step_s
    mistakes = (
        (0, "a job cannot save before a step: at least 1"),
        (exact * step_s, "that is in seconds: divide by those of a step"),
        (alone, "that is for one GPU: a job stops when any of its GPUs fails"),
        (exact / 2**0.5, "the 2 under the root is missing"),
        (exact * exact * step_s, "the root is missing"),
    )
    right = "w = √(2·δ·μ), and μ is that of one GPU divided by the GPUs"
    hint = next((why for wrong, why in mistakes if abs(answer - wrong) <= max(0.5, NEAR * wrong)), right)
    raise Mistake(f"{where} it should be {max(1, round(exact)):,} steps, not {answer:,.4g}: {hint}.")


def my_reads(rows, before, now, rank):
    old, new = -(-rows // before), -(-rows // now)  # rows of a shard, rounded up
    first, last = min(rank * new, rows), min((rank + 1) * new, rows)
    pieces = []
    for shard in range(before):
        begin, end = max(first, shard * old), min(last, (shard + 1) * old)
        if begin < end:
            pieces.append((shard, begin, end))
    return pieces


def my_save(state, path):
    beside = path.with_suffix(".new")  # in the same folder: a rename goes nowhere else
    with open(beside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def my_steps(step_s, save_s, gpu_s, gpus):
    between_s = gpu_s / gpus  # any of them stops the job
    interval = (2 * save_s * between_s) ** 0.5
    return max(1, round(interval / step_s))
