"""ZeroRedundancyOptimizer trains nothing of groups that are given as `parameters()` (torch 2.13.0)."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--groups", default="generators", help="how groups have their parameters: generators or lists")
kept = {"generators": lambda parameters: parameters, "lists": list}[parser.parse_args().groups]
dist.init_process_group("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
bare = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
model = DistributedDataParallel(bare)
groups = [{"params": kept(bare[0].parameters())}, {"params": kept(bare[2].parameters()), "lr": 0.2}]
if ranks > 1:
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.SGD, lr=0.1)
else:
    optimizer = torch.optim.SGD(groups, lr=0.1)
for step in range(3):
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    loss = model(batch.chunk(ranks)[rank]).square().mean()
    loss.backward()
    optimizer.step(), optimizer.zero_grad()
    if rank == 0:
        print(
            f"step {step} norm of the parameters {sum(p.square().sum() for p in bare.parameters()).item() ** 0.5:.6f}"
        )
