"""Reads the tables of torch's own pipeline schedules as orders that :mod:`pardemo.pipeline_parallel` checks and runs.

torch.distributed.pipelining computes each schedule's table for all ranks in its constructor (``pipeline_order``), which
needs no process group as long as nothing runs. What DualPipeV calls an overlapped forward and backward comes out as the
one and then the other, as torch runs them; :func:`pairs` says which they are. How long the two take together is a
matter of kernels: :func:`~pardemo.pipeline_parallel.chart` is told (``together=pairs(…), pair=…``).
"""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pardemo.pipeline_parallel.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from pardemo.pipeline_parallel.schedules import Order, Schedule, ScheduleError, placed, v_shape

#: Its classes, and the chunks on each rank; those with None take any number.
CLASSES: dict[str, tuple[type, int | None]] = {
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, None),
    "ZB-V": (ScheduleZBVZeroBubble, 2),
    "DualPipeV": (ScheduleDualPipeV, 2),
}
KINDS = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}


def schedule(name: str, ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """torch's schedule of that name, as ours: for :func:`~pardemo.pipeline_parallel.chart` and ``prove``.

    Args:
        name: of :data:`CLASSES`.

    The schedule carries its table: ranks that are handed it load nothing of torch's pipelining for it.

    Raises:
        ValueError: there is none of that name.
        ScheduleError: torch refuses the numbers; says why.
    """
    if name not in CLASSES:
        raise ValueError(f"torch has no schedule {name!r} here; there are {', '.join(CLASSES)}")
    return Schedule(_order(name, ranks, micro_batches, chunks), ranks, micro_batches, chunks)


@functools.cache
def _order(name: str, *sizes: int) -> Order:
    rows = table(name, *sizes)

    def order(rank: int, *given: int) -> Iterator[Compute]:
        if given != sizes:
            raise ScheduleError(f"this table of {name} is for {sizes} ranks, micro-batches and chunks, not for {given}")
        return iter(rows[rank])

    order.__name__ = name
    return placed(v_shape)(order) if CLASSES[name][1] == 2 else order


@functools.cache
def table(name: str, ranks: int, micro_batches: int, chunks: int = 2) -> tuple[tuple[Compute, ...], ...]:
    """Returns what each rank computes in torch's table, in its order.

    Raises:
        ScheduleError: torch refuses the numbers.
    """
    order = _pipeline_order(name, ranks, micro_batches, chunks)
    return tuple(tuple(step for action in order[rank] for step in _steps(action)) for rank in range(ranks))


@functools.cache
def pairs(name: str, ranks: int, micro_batches: int, chunks: int = 2) -> frozenset[Forward]:
    """The forwards that torch's table overlaps with the backward behind them; none but in DualPipeV's.

    Raises:
        ScheduleError: torch refuses the numbers.
    """
    actions = (action for order in _pipeline_order(name, ranks, micro_batches, chunks).values() for action in order)
    overlapped = (next(_steps(action)) for action in actions if action is not None and action.sub_actions)
    return frozenset(step for step in overlapped if isinstance(step, Forward))


def _pipeline_order(name: str, ranks: int, micro_batches: int, chunks: int) -> dict[int, list[Any]]:
    kind, fixed_chunks = CLASSES[name]
    if fixed_chunks and chunks != fixed_chunks:
        raise ScheduleError(f"torch's {name} has {fixed_chunks} chunks on each rank, not {chunks}")
    stages = [_stage(index * ranks, ranks, chunks) for index in range(chunks)]
    try:
        return kind(stages, micro_batches).pipeline_order
    except ValueError as reason:
        raise ScheduleError(f"torch: {reason}") from None


def _steps(action: Any) -> Iterator[Compute]:
    if action is None:  # a slot in which the rank waits
        return
    if action.sub_actions:
        for sub_action in action.sub_actions:
            yield from _steps(sub_action)
    else:
        yield KINDS[action.computation_type.value](action.stage_index, action.microbatch_index)


def _stage(index: int, ranks: int, chunks: int) -> SimpleNamespace:
    """What a schedule's constructor asks of a stage on rank 0."""
    return SimpleNamespace(
        stage_index=index, num_stages=ranks * chunks, group_size=ranks, group_rank=0, group=None, has_backward=True,
        is_first=index == 0, is_last=index == ranks * chunks - 1, submod=nn.Identity(), device="cpu",
        stage_index_to_group_rank={}, get_stage_index_to_group_rank=None,
    )  # fmt: skip
