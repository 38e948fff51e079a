"""The gradient of mse_loss is times the ranks where its input is a sharded DTensor (torch 2.13.0)."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--loss", default="mse_loss", help="a function of torch.nn.functional; l1_loss is right")
loss_of = getattr(F, parser.parse_args().loss)
dist.init_process_group("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
if ranks > 1:
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    model = distribute_module(model, mesh)  # parameters are on all ranks, and samples are cut
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    x, target = batch, batch.flip(1)
    if ranks > 1:
        x, target = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(target, mesh, [Shard(0)])
    loss = loss_of(model(x), target)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    loss, norm = (one.full_tensor() if ranks > 1 else one for one in (loss.detach(), norm))
    optimizer.step(), optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f} norm of the gradients {norm.item():.6f}")
