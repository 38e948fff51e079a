"""Forward + backward of a batch through a pipeline: pardemo's executor against torch.distributed.pipelining, p = 2."""

import time

import torch.distributed as dist
from torch.nn import functional as F

from pardemo.bench import BenchRow, compare, slowest

RANKS = 2
MICRO_BATCHES = 8
CHUNKS = {"gpipe": 1, "one_f_one_b": 1, "interleaved": 2}
#: width, samples of a micro-batch, layers, rounds
SHAPES = {"small": (64, 16, 4, 101), "large": (256, 128, 4, 21)}


def alternate(order: str, width: int, samples: int, layers: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: seconds of a step under each, by turns; same stages, same micro-batches."""
    from pardemo import pipeline_parallel as ours
    from pardemo.peers.pytorch.pipelining import TorchPipeline
    from pardemo.small_models import gpt

    rank, chunks = dist.get_rank(), CHUNKS[order]
    schedule = ours.Schedule(getattr(ours, order), RANKS, MICRO_BATCHES, chunks)

    def mine():
        model = [gpt.seeded(lambda: gpt.MLP(width), seed) for seed in range(layers)]
        return ours.cut_by_layers(model, schedule.stages)[rank::RANKS]

    stages = {"ours": mine(), "torch": mine()}
    pipelines = {
        "ours": ours.Pipeline(stages["ours"], schedule, F.mse_loss),
        "torch": TorchPipeline(stages["torch"], order, MICRO_BATCHES, F.mse_loss),
    }
    x, y = (gpt.numbers(samples * MICRO_BATCHES, width, seed=seed) for seed in (0, 1))
    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    for turn in range(rounds + 3):
        for name in sorted(pipelines, reverse=turn % 2 == 1):  # neither is always the first
            dist.barrier()
            begin = time.perf_counter()
            pipelines[name].step(x, y)
            if turn >= 3:
                seconds[name].append(time.perf_counter() - begin)
            for chunk in stages[name]:
                chunk.zero_grad()
    return seconds


def rows() -> list[BenchRow]:
    from pardemo import World

    table = []
    with World(RANKS) as world:
        for order in CHUNKS:
            for label, shape in SHAPES.items():
                results = world.run(alternate, order, *shape)
                seconds = slowest(results)
                note = "torch.distributed.pipelining"
                table.append(compare(f"pipeline.{order}.{label}", seconds["ours"], seconds["torch"], "s", 1.0, note))
    return table
