"""Measures, for pages on pipelines, stages that only wait, their memory, and training beside one process."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from pardemo import pipeline_parallel as pp
from pardemo.meters import MemoryMeter, Timeline, WireMeter
from pardemo.meters.padding import PaddedModule
from pardemo.meters.timeline import Span
from pardemo.pipeline_parallel.schedules import Order
from pardemo.pipeline_parallel.stages import balance
from pardemo.small_models import gpt
from pardemo.world.rank import device

RANKS, LAYERS, MICRO_BATCHES, STEPS = 2, 4, 8, 3
PACE_S = 0.03  # long beside what it takes to wake a process
LR = 10.0  # the gradient of a mean over so many numbers is small
#: The name of a schedule -> the package's order, and how many stages a rank has.
ORDERS = {
    "GPipe": (pp.gpipe, 1),
    "1F1B": (pp.one_f_one_b, 1),
    "interleaved": (pp.interleaved, 2),
    "ZB-H1": (pp.zb_h1, 1),
    "ZB-V": (pp.zb_v, 2),
}
#: Schedules that PyTorch alone has: the name of its timetable -> what ``TorchPipeline`` calls it.
OF_TORCH = {"interleaved zero bubble": "zb_h1", "DualPipeV": "dual_pipe_v"}


def paced(
    order: Order, micro_batches: int, chunks: int = 1, pace_s: float = PACE_S, rows: int = 1, features: int = 8
) -> list[list[Span]]:
    """On every rank: the spans of two steps. A rank only waits: τF = τI = τW = ``pace_s`` for each micro-batch.

    Stages send each other tensors of [rows, features] in fp32, one for each micro-batch.
    """
    each, timeline, steps = pace_s / chunks, Timeline(), []
    layers = [nn.Linear(features, features) for _ in range(chunks)]
    stages = [PaddedModule(layer, each, each, weights_s=each).to(device()) for layer in layers]
    schedule = pp.Schedule(order, dist.get_world_size(), micro_batches, chunks)
    pipeline = pp.Pipeline(stages, schedule, F.mse_loss, timeline=timeline)
    x, y = torch.ones(2, micro_batches * rows, features, device=device())
    for _ in range(2):
        timeline.spans.clear()
        dist.barrier()
        pipeline.step(x, y)
        steps.append(list(timeline.spans))
    return steps


def quickest(of_ranks: Sequence[list[list[Span]]]) -> pp.Chart:
    """The shortest of the steps that :func:`paced` returned on all ranks: other work on this machine disturbed it
    least."""
    charts = [pp.measured_chart([span for rank in step for span in rank]) for step in zip(*of_ranks, strict=True)]
    return min(charts, key=lambda chart: chart.makespan)


def peak_bytes(
    order: Order, layers: Sequence[nn.Module], batch: Sequence[torch.Tensor], micro_batches: int, chunks: int = 1,
    checkpointing: bool = False,
) -> int:  # fmt: skip
    """On every rank: the peak of activations in a step, in bytes. A step before it has allocated the gradients."""
    schedule = pp.Schedule(order, dist.get_world_size(), micro_batches, chunks)
    stages = pp.cut_by_layers(layers, schedule.stages)
    mine = [stages[s] for s in schedule.stages_of(dist.get_rank())]
    pipeline = pp.Pipeline(mine, schedule, F.mse_loss, checkpointing=checkpointing)
    pipeline.step(*batch)
    with MemoryMeter(mine) as memory:
        pipeline.step(*batch)
    return memory.peak["activations"]


class PipelineRun(NamedTuple):
    """One rank's losses (None unless it has the last stage), bytes sent in the last step, and peak."""

    losses: list[float] | None
    sent_bytes: int
    peak_bytes: int  # of activations


def alone(width: int, samples: int) -> list[float]:
    """The losses of the same training in one process. ``samples``: of a micro-batch."""
    net = nn.Sequential(*_layers(width))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    return _train(step, net, width, samples, updates=True)[0]


def train(engine: str, name: str, width: int, samples: int) -> PipelineRun:
    """On both ranks: some steps of SGD under "pardemo", "torch" or "DeepSpeed" with a schedule of :data:`ORDERS`, or
    with a timetable of :data:`OF_TORCH`."""
    schedule = _schedule(name)
    stages = pp.cut_by_layers(_layers(width), schedule.stages)
    mine = nn.ModuleList(stages[s] for s in schedule.stages_of(dist.get_rank()))
    if engine == "DeepSpeed":
        from pardemo.peers.deepspeed.pipeline import DeepSpeedPipeline

        pipeline = DeepSpeedPipeline(stages, MICRO_BATCHES, MICRO_BATCHES * samples, F.mse_loss, lr=LR)
    else:
        pipeline = _pipeline(engine, list(mine), schedule)
    result = _train(pipeline.step, mine, width, samples, updates=engine != "DeepSpeed")  # whose step does it
    return PipelineRun(*result)


def compared(
    runs: Sequence[dict[tuple[str, str], PipelineRun]], losses: Sequence[float], width: int, samples: int
) -> dict[tuple[str, str], tuple[float, float, float]]:
    """For each case of :func:`train` on both ranks: the largest error of its losses, what rank 0 sent in a step, in
    m·A, and the most activations of a rank, in what a micro-batch leaves in two MLPs."""
    sizes, by_case = 4 * samples * width, {}
    for case in runs[0]:
        first, last = (of_rank[case] for of_rank in runs)
        pairs = zip(first.losses or last.losses or [], losses, strict=True)
        error = max(abs(loss - right) for loss, right in pairs)
        held = max(first.peak_bytes, last.peak_bytes) / (18 * sizes)
        by_case[case] = error, first.sent_bytes / (MICRO_BATCHES * sizes), held
    return by_case


def stage_lengths(vocabulary: int, hidden: int) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """A GPT of 12 blocks cut into four stages in four ways.

    Returns, for each way, how long each stage computes, in blocks, and how many layers it has.
    """
    model = gpt.seeded(lambda: gpt.GPT(vocabulary=vocabulary, hidden=hidden, layers=12))
    net = gpt.layers_of(model)
    x, cost = gpt.text(1, 33, vocabulary)[:, :-1], []
    for layer in net:
        with FlopCounterMode(display=False) as counter:
            x = layer(x)
        cost.append(counter.get_total_flops() / (24 * hidden**2 * 32))  # for 32 tokens
    weights = [sum(w.numel() for w in layer.parameters()) for layer in net]
    cuts = {"by layers": [4, 4, 4, 3], "by parameters": balance(weights, 4), "by arithmetic": balance(cost, 4)}
    lengths = {name: [sum(part).item() for part in torch.tensor(cost).split(cut)] for name, cut in cuts.items()}
    everywhere = "output on all stages"
    return lengths | {everywhere: [3 + cost[-1] / 4] * 4}, cuts | {everywhere: [4, 3, 3, 4]}


def _schedule(name: str) -> pp.Schedule:
    if name in OF_TORCH:
        from pardemo.peers.pytorch import orders

        return orders.schedule(name, RANKS, MICRO_BATCHES)
    order, chunks = ORDERS[name]
    return pp.Schedule(order, RANKS, MICRO_BATCHES, chunks)


def second_over_first(engine: str, width: int, samples: int, **options: bool) -> float:
    """On both ranks: a gradient's norm after the second of two steps, over its norm after the first one.

    Gradients are not cleared between the steps. ``options`` are the engine's.
    """
    module = _layers(width)[dist.get_rank()]
    pipeline, norms = _pipeline(engine, [module], pp.Schedule(pp.gpipe, RANKS, MICRO_BATCHES), **options), []
    for _ in range(2):
        pipeline.step(*_batch(width, samples))
        norms.append(module.first.weight.grad.norm().item())
    return norms[1] / norms[0]


def _pipeline(engine: str, chunks: list[nn.Module], schedule: pp.Schedule, **options: bool):
    if engine == "pardemo":
        return pp.Pipeline(chunks, schedule, F.mse_loss, **options)
    from pardemo.peers.pytorch.pipelining import TorchPipeline

    name = schedule.order.__name__
    return TorchPipeline(chunks, OF_TORCH.get(name, name), schedule.micro_batches, F.mse_loss, **options)


def _train(step, modules: nn.Module, width: int, samples: int, updates: bool):
    optimizer, losses, batch = torch.optim.SGD(modules.parameters(), lr=LR), [], _batch(width, samples)
    for _ in range(STEPS):
        with MemoryMeter(modules) as memory, WireMeter() as meter:
            loss = step(*batch)
        losses.append(loss)
        if updates:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    loss_values = None if losses[0] is None else [loss.item() for loss in losses]
    return loss_values, meter.sent_bytes, memory.peak["activations"]


def _layers(width: int) -> list[nn.Module]:
    return [gpt.seeded(lambda: gpt.MLP(width), seed).to(device()) for seed in range(LAYERS)]


def _batch(width: int, samples: int) -> list[torch.Tensor]:
    return [gpt.numbers(MICRO_BATCHES * samples, width, seed=seed).to(device()) for seed in (0, 1)]
