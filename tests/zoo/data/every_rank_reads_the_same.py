"""Each rank shuffles the whole data with one seed, so that all ranks train on the same samples.

The loader has no DistributedSampler, and a seed for all ranks makes their permutations equal: eight ranks compute
one rank's gradient eight times, and the rest of the data comes in steps that belong to others. rbyte 106 found it
in a loader into which Lightning could not put its sampler; openspeech 149 in samplers of its own.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

WIDTH, SAMPLES = 16, 96


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

    torch.manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH)
    data = TensorDataset(x, x.roll(1, dims=1))
    if args.mended:
        sampler = DistributedSampler(data, seed=7)
    else:
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(7))
    loader = iter(DataLoader(data, args.batch, sampler=sampler))
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(SAMPLES // (args.batch * args.accumulate * world)):
        printed = 0
        for m in range(args.accumulate):
            given, wanted = next(loader)
            with nullcontext() if m == args.accumulate - 1 else model.no_sync():
                loss = F.mse_loss(model(given), wanted) / args.accumulate
                loss.backward()
            printed += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed)
        if rank == 0:
            print(f"step {step} loss {printed / world:.4f}")
