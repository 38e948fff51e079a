"""Data parallelism with a GradScaler, whose first steps may be skipped, since their gradients are not finite."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=float, default=65536.0)
parser.add_argument("--apart", default="no", help="scale: rank 1 begins with half of it; inf: it skips one step")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
own = nn.Parameter(torch.zeros(1))  # of which each rank looks for infinities by itself
optimizer = torch.optim.SGD([*model.parameters(), own] if args.apart == "inf" else model.parameters(), lr=0.1)
first = args.scale / 2 if args.apart == "scale" and rank else args.scale
scaler = torch.amp.GradScaler("cuda", init_scale=first)
for step in range(12):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
    scaler.scale(16 * model(x).square().mean()).backward()
    own.grad = torch.tensor([float("inf") if rank and step == 1 else 0.0])
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
