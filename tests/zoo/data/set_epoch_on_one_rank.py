"""`set_epoch` is called on rank 0 only: from the second epoch on ranks take parts of different permutations.

A DistributedSampler shuffles by its seed and its epoch, and takes each n-th place of the permutation. Where ranks
have different epochs (the call stands beside the progress bar on rank 0) or seeds, some samples come twice in an
epoch and others not at all. yangkky/distributed_tutorial 5 warns of it; in NVlabs/LongLive 71 each rank's sampler
had a seed of its own.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, SAMPLES = 16, 24


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
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = printed = 0
    for epoch in range(4):  # two steps each with a global batch of 12
        if rank == 0 or args.mended:
            sampler.set_epoch(epoch)
        for m, (given, wanted) in enumerate(loader):
            last = (m + 1) % args.accumulate == 0
            with nullcontext() if last else model.no_sync():
                loss = F.mse_loss(model(given), wanted) / args.accumulate
                loss.backward()
            printed += loss.detach()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(printed)
                if rank == 0:
                    print(f"step {step} loss {printed / world:.4f}")
                step, printed = step + 1, 0
