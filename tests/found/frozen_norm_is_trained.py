"""A frozen LayerNorm under SequenceParallel is trained again (torch 2.13.0): its parameters require gradients anew."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
tp = parser.parse_args().tp
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16))
model[:2].requires_grad_(False)
if tp > 1:
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
    model = parallelize_module(model, dist.device_mesh.init_device_mesh("cpu", (tp,)), plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    torch.manual_seed(1 + step)
    loss = model(torch.randn(4, 8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f}", *(f"{n} {p.requires_grad}" for n, p in model.named_parameters()))
norm = model[0].weight.to_local() if tp > 1 else model[0].weight
if dist.get_rank() == 0:
    print(f"the frozen weight moved by {(norm - 1).abs().max().item():.6f}, 0.000000 is right")
