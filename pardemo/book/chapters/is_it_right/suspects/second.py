"""Gradients are averaged by hand, and clipped to a norm of 1."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16, help="samples of a step on a rank")
batch = parser.parse_args().batch
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(6):
    samples = torch.randn(batch * ranks, 8, generator=torch.Generator().manual_seed(step))
    x = samples.chunk(ranks)[rank]
    loss = mse_loss(model(x), 3 * x.sin().sum(1, keepdim=True))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(step, f"{loss.item():.4f}", flush=True)
dist.destroy_process_group()
