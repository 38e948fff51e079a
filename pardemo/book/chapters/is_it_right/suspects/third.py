"""A head is trained for two steps, then the layers below it, too."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16, help="samples of a step on a rank")
batch = parser.parse_args().batch
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
below = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
below.requires_grad_(False)
model = DistributedDataParallel(nn.Sequential(below, nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(6):
    if step == 2:
        below.requires_grad_(True)
    samples = torch.randn(batch * ranks, 8, generator=torch.Generator().manual_seed(step))
    x = samples.chunk(ranks)[rank]
    loss = mse_loss(model(x), x.sin().sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(step, f"{loss.item():.4f}", flush=True)
dist.destroy_process_group()
