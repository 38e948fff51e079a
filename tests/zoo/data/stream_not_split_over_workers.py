"""A stream of samples is read from its beginning in each worker of the loader: each sample comes once a worker.

Each worker process has a copy of the IterableDataset, and the loader takes a batch of each in turn. A dataset that
does not ask `get_worker_info()` which worker it is in gives them all the same: with two workers each batch comes
twice, one step after the other. Streams of Hugging Face's datasets did (datasets 3423); PyTorch's page on
IterableDataset warns of it.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WIDTH, STEPS = 16, 6


class Stream(IterableDataset):
    """Samples made from their numbers: a rank takes its own, and of `count` workers each takes every count-th batch."""

    def __init__(self, batch: int, rank: int, world: int, mended: bool) -> None:
        self.batch, self.rank, self.world, self.mended = batch, rank, world, mended

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, count = (worker.id, worker.num_workers) if worker and self.mended else (0, 1)
        for step in range(first, STEPS, count):
            for i in range(self.batch):
                number = (step * self.world + self.rank) * self.batch + i
                yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.answer = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(F.gelu(self.read(x)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    stream = Stream(args.batch, rank, world, args.mended)
    loader = iter(DataLoader(stream, args.batch, num_workers=args.workers))
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS):
        x = next(loader)
        loss = F.mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        printed = loss.detach().clone()
        dist.all_reduce(printed)
        if rank == 0:
            print(f"step {step} loss {printed / world:.4f}")
