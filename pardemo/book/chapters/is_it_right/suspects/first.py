"""Two micro-batches a step, summed over the ranks once."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, help="samples of a micro-batch on a rank")
batch = parser.parse_args().batch
dist.init_process_group("gloo")
rank, ranks, accumulate = dist.get_rank(), dist.get_world_size(), 2
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(6):
    samples = torch.randn(batch * ranks * accumulate, 8, generator=torch.Generator().manual_seed(step))
    mine = samples.chunk(ranks)[rank]
    for number, x in enumerate(mine.split(batch)):
        model.require_backward_grad_sync = number == 0
        loss = mse_loss(model(x), x.sin().sum(1, keepdim=True)) / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(step, f"{loss.item():.4f}", flush=True)
dist.destroy_process_group()
