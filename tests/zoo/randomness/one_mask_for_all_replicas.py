"""Each data-parallel rank drops the same places of its samples, because all have one seed.

With one seed for all, sample i of each rank gets the same mask: dropout averages over as many masks as one rank has
samples, however many ranks there are. transformers 31412 reports major losses of quality under its Trainer with
DDP; accelerate 236 asks for a seed by rank for the same reason.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.dropout, self.answer = nn.Linear(WIDTH, 64), nn.Dropout(0.1), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(self.dropout(F.gelu(self.read(x))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(42)
    model = DistributedDataParallel(Model())
    if args.mended:
        torch.manual_seed(42 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(args.batch * args.accumulate * world, WIDTH, generator=generator)
        printed = 0
        for m in range(args.accumulate):
            mine = x[torch.arange(args.batch) + (m * world + rank) * args.batch]
            with nullcontext() if m == args.accumulate - 1 else model.no_sync():
                loss = F.mse_loss(model(mine), mine.roll(1, dims=1)) / args.accumulate
                loss.backward()
            printed += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed)
        if rank == 0:
            print(f"step {step} loss {printed / world:.4f}")
