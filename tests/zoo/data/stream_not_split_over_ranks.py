"""A stream of samples is read from its beginning on each rank, so that all ranks train on the same samples.

An IterableDataset has no sampler: nobody divides it but itself. DistributedDataParallel does not, and a loader
takes what comes. Streams of Hugging Face's datasets came whole on each rank until `split_dataset_by_node` was there
(datasets 5360), and 7868 has them again when splitting and interleaving meet.
"""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

WIDTH, STEPS = 16, 6


class Stream(IterableDataset):
    """Samples without an end, each made from its number; of every `step` of them the one at `start`."""

    def __init__(self, start: int, step: int) -> None:
        self.start, self.step = start, step

    def __iter__(self) -> Iterator[torch.Tensor]:
        number = self.start
        while True:
            yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
            number += self.step


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.answer = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(F.gelu(self.read(x)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    stream = Stream(rank, world) if args.mended else Stream(0, 1)
    loader = iter(DataLoader(stream, args.batch))
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS):
        printed = 0
        for m in range(args.accumulate):
            x = next(loader)
            with nullcontext() if m == args.accumulate - 1 else model.no_sync():
                loss = F.mse_loss(model(x), x.roll(1, dims=1)) / args.accumulate
                loss.backward()
            printed += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed)
        if rank == 0:
            print(f"step {step} loss {printed / world:.4f}")
