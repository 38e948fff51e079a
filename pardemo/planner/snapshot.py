"""The planned memory of a step, for torch's memory viewer (https://docs.pytorch.org/memory_viz)."""

import numpy as np

from pardemo.meters.snapshot import Block, of_sums
from pardemo.planner.footprint import LINES, Footprint
from pardemo.planner.memory import Curve
from pardemo.planner.table import PlanRow, Request, cut, jobs


def of_row(request: Request, row: PlanRow) -> list[Block]:
    """Each tensor of the row's dry run, from its birth to its end; the rest of a GPU's memory as blocks that stay.

    What is alive at most at one time is the row's ``peak_bytes``, rounded to whole bytes. The allocator's block is what
    it reserves at most beyond the tensors of that time, rounding included.
    """
    curve = Curve(jobs(request)[row.engine, row.checkpointing])
    run, nbytes = curve.events(row.batch, *cut(request, row.batch, row.offload))
    tensors, most = _tensors(run, nbytes)
    beside = {name: round(value) for name, value in row.memory.lines.items() if name not in (*LINES, "allocator")}
    beside["allocator"] = round(row.memory.peak_bytes) - most - sum(beside.values())
    return [*of_sums(beside, "beside torch's tensors"), *tensors]


def _tensors(run: Footprint, nbytes: np.ndarray) -> tuple[list[Block], int]:
    """The storages of a dry run's step, and the most bytes of them at one time.

    A storage that grows or shrinks is another block from then on.
    """
    who, first = run.changes[:, 0], run.first_event
    there = np.bincount(who[:first], nbytes[:first], len(run.lives))
    size = dict.fromkeys(range(len(run.lives)), 0.0)
    born: dict[int, int] = {}
    blocks: list[Block] = []
    changes = [(storage, there[storage], 1) for storage in np.flatnonzero(there).tolist()]
    changes += [
        (s, n, 2 + k) for k, (s, n) in enumerate(zip(who[first:].tolist(), nbytes[first:].tolist(), strict=True))
    ]
    total = most = 0
    for storage, change, when in changes:
        before, size[storage] = round(size[storage]), size[storage] + change
        after = round(size[storage])
        if before == after:
            continue
        total += after - before
        most = max(most, total)
        if before:
            blocks[born[storage]] = blocks[born[storage]]._replace(died=when)
        if after:
            life = run.lives[storage]
            born[storage] = len(blocks)
            blocks.append(
                Block(after, LINES[run.line_of[storage]], f"{life.origin}, {life.phase}", life.module, when, None,
                      life.phase)
            )  # fmt: skip
    return blocks, most
