"""The last batch of an epoch is filled up with samples of its beginning, which are counted twice.

A DistributedSampler gives each rank the same number of samples, and repeats some if their number cannot be divided;
it says so on its page only. In validation it makes the result depend on the number of ranks (pytorch 25162 and
22584), in training a few samples weigh double in each epoch's last step. `drop_last` of the sampler and of the
loader leave the rest out instead.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, SAMPLES = 16, 22


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.answer = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(F.gelu(self.read(x)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH)
    data = TensorDataset(x, x.roll(1, dims=1))
    sampler = DistributedSampler(data, drop_last=args.mended)
    loader = DataLoader(data, args.batch, sampler=sampler, drop_last=args.mended)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = 0
    for epoch in range(3):  # of 8, 8 and 6 samples
        sampler.set_epoch(epoch)
        for given, wanted in loader:
            loss = F.mse_loss(model(given), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            printed = loss.detach().clone()
            dist.all_reduce(printed)
            if rank == 0:
                print(f"step {step} loss {printed / world:.4f}")
            step += 1
