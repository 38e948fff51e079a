"""One training step: pardemo's wrappers against torch's DistributedDataParallel, same model, N = 2."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardemo.bench import BenchRow, compare, slowest
from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel

RANKS = 2
SHAPES = {"small": (256, 8, 16), "medium": (512, 8, 64), "large": (1024, 8, 64)}  # width, layers, samples
ROUNDS = {"small": 41, "medium": 21, "large": 13}


def mlp(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])


def alternate(width: int, layers: int, samples: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: seconds of a step under each wrapper, by turns."""
    wrappers = {"bucketed": BucketedDataParallel, "naive": NaiveDataParallel, "torch": DistributedDataParallel}
    models = {name: wrap(mlp(width, layers)) for name, wrap in wrappers.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-3) for name, model in models.items()}
    batch = torch.randn(samples, width)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 3):
        for name, model in models.items():
            dist.barrier()
            begin = time.perf_counter()
            optimizers[name].zero_grad()
            model(batch).square().mean().backward()
            optimizers[name].step()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def rows() -> list[BenchRow]:
    from pardemo import World

    table = []
    with World(RANKS) as world:
        for label, shape in SHAPES.items():
            results = world.run(alternate, *shape, ROUNDS[label])
            seconds = slowest(results)
            for name, target in (("bucketed", 0.9), ("naive", None)):
                row = f"data-parallel.{name}.{label}"
                table.append(compare(row, seconds[name], seconds["torch"], "s", target, "torch's DDP, its defaults"))
    return table
