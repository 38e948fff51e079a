"""Data-parallel ranks draw their initial parameters from different seeds, and nobody sends rank 0's to the others.

Gradients are averaged, so all ranks make the same step, each from another place: the difference stays for the whole
training, and each gradient is a mean over different models. The seed is `seed + rank` for the sake of augmentation
or dropout and is set before the model is built (detr 544, deit 239). DistributedDataParallel sends rank 0's
parameters; who averages gradients himself has to (goodfire-ai/spd 412, and the documentation of Horovod on
`broadcast_parameters`).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import average_gradients
from torch import nn

WIDTH = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.hidden, self.answer = nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(F.gelu(self.hidden(F.gelu(self.read(x)))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(42 + rank)
    model = Model()
    if args.mended:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(args.batch * args.accumulate * world, WIDTH, generator=generator)
        printed = 0
        for m in range(args.accumulate):
            mine = x[torch.arange(args.batch) + (m * world + rank) * args.batch]
            loss = F.mse_loss(model(mine), mine.roll(1, dims=1)) / args.accumulate
            loss.backward()
            printed += loss.detach()
        average_gradients(model, dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed)
        if rank == 0:
            print(f"step {step} loss {printed / world:.4f}")
