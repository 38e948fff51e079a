"""Runs, for *Pipelines without bubbles*, steps beside one process, and counts DualPipeV's idle time."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import pipeline_parallel as pp
from pardemo.book.chapters.pipeline_parallel.measurements import (
    alone,
    compared,
    paced,
    peak_bytes,
    quickest,
    train,
)
from pardemo.formulas import pipeline as formulas
from pardemo.meters import WireMeter
from pardemo.peers.pytorch import orders
from pardemo.pipeline_parallel.instructions import Compute, Forward
from pardemo.small_models import gpt

__all__ = [
    "PUT_OFF", "WHOLE", "alone", "beside_one_process", "compared", "counted_and_published", "idle_of_last",
    "law_holds", "paced", "peak_bytes", "quickest", "train", "whole_at_the_end",
]  # fmt: skip
#: Times of one chunk: F, I, W, and F&B of a forward and a backward that run together.
TIMES = {"I = F": (1, 1, 1, 3), "I = 1.5 F": (1, 1.5, 0.5, 2.7)}
PUT_OFF, WHOLE = "each W put off at the end", "whole backwards at the end"


class StepResult(NamedTuple):
    """The largest relative error of loss and gradients, and the bytes that the rank sent."""

    error: float
    sent_bytes: int


def beside_one_process(schedule: pp.Schedule, layers: Sequence[nn.Module], batch: Sequence[torch.Tensor]) -> StepResult:
    """On every rank: the second step of a schedule, against the loss and gradients of all layers in one process."""
    model = nn.Sequential(*layers)
    weights = list(model.parameters())
    loss = F.mse_loss(model(batch[0]), batch[1])
    right = dict(zip(weights, torch.autograd.grad(loss, weights), strict=True))
    stages = pp.cut_by_layers(layers, schedule.stages)
    mine = [stages[stage] for stage in schedule.stages_of(dist.get_rank())]
    pipeline = pp.Pipeline(mine, schedule, F.mse_loss)
    pipeline.step(*batch)  # opens connections
    model.zero_grad()
    with WireMeter() as meter:
        stage_loss = pipeline.step(*batch)
    errors = [gpt.relative_error(w.grad, right[w]) for chunk in mine for w in chunk.parameters()]
    if stage_loss is not None:  # on the last stage's rank
        errors.append(gpt.relative_error(stage_loss, loss.detach()))
    return StepResult(max(errors), meter.sent_bytes)


def idle_of_last(
    schedule: pp.Schedule, forward: float, of_input: float, of_weights: float, pair: float,
    more: Collection[Forward] = (),
) -> float:  # fmt: skip
    """Returns how long DualPipeV's last rank is idle, with its pairs as one computation; times of a chunk.

    Args:
        more: forwards that are pairs as well, with the backward behind them.
    """
    together = orders.pairs("DualPipeV", schedule.ranks, schedule.micro_batches).union(more)
    times = 2 * forward, 2 * (of_input + of_weights), 0, 2 * of_weights  # a rank has two chunks
    return pp.chart(schedule, *times, together=together, pair=2 * pair).idle[-1]


@pp.placed(pp.v_shape)
def whole_at_the_end(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Compute]:
    """DualPipeV whose backwards are whole once no forward is left: MindSpeed's, unless it is told otherwise."""
    steps = orders.table("DualPipeV", ranks, micro_batches)[rank]
    last = max(index for index, step in enumerate(steps) if isinstance(step, Forward))
    yield from steps[: last + 1]
    for step in steps[last + 1 :]:
        if isinstance(step, pp.BackwardInput):
            yield pp.Backward(step.stage, step.micro_batch)
        elif isinstance(step, pp.Backward):
            yield step


Idle = dict[str, dict[int, float]]


def counted_and_published(sizes: Sequence[int]) -> dict[str, tuple[Idle, Idle]]:
    """The last rank's idle time for each p of ``sizes``, with m = 2p.

    Returns, for each of :data:`TIMES`, what the two timetables come to and what the two published formulas say.
    """
    panels = {}
    for case, times in TIMES.items():
        forward, of_input, of_weights, pair = times
        backward = of_input + of_weights
        counted = {
            PUT_OFF: {p: idle_of_last(orders.schedule("DualPipeV", p, 2 * p), *times) for p in sizes},
            WHOLE: {p: idle_of_last(pp.Schedule(whole_at_the_end, p, 2 * p, 2), *times) for p in sizes},
        }
        published = {
            "DeepSeek's formula": {p: formulas.deepseek_bubble(2 * p, backward, of_weights, pair) for p in sizes},
            "MindSpeed's formula": {
                p: formulas.mindspeed_bubble(p, forward, backward, of_weights, pair) for p in sizes
            },
        }
        panels[case] = counted, published
    return panels


def law_holds(panels: dict[str, tuple[Idle, Idle]]) -> list[bool]:
    """For each timetable of :func:`counted_and_published`, whether the formula with its last term is its idle time."""
    return [
        abs(
            waits_for
            - formulas.dual_pipe_v_idle(p, forward, of_input + of_weights, of_weights, pair, puts_off=name == PUT_OFF)
        )
        < 1e-9
        for case, (forward, of_input, of_weights, pair) in TIMES.items()
        for name, counted in panels[case][0].items()
        for p, waits_for in counted.items()
    ]
