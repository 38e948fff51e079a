"""FSDP2 divides gradients twice by a factor of one's own where a mesh shards over one rank (torch 2.13.0)."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--shards", type=int, default=1, help="ranks that a parameter is cut over; the others replicate")
shards = parser.parse_args().shards
dist.init_process_group("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
if ranks > 1:
    names = ("replicate", "shard")
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=names))
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(float(ranks))  # the mean over ranks, as without this line
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    loss = model(batch.chunk(ranks)[rank]).square().mean()
    loss.backward()
    norm = sum(p.grad.square().sum() for p in model.parameters()) ** 0.5
    norm = norm.full_tensor() if ranks > 1 else norm
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"step {step} loss {loss.item() / ranks:.6f} norm of the gradients {norm.item():.6f}")
