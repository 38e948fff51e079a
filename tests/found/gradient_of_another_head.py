"""HSDP adds one head's gradient to another's, where micro-batches use different heads (torch 2.13.0)."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Heads(nn.ModuleDict):
    def forward(self, x, head):
        return self[head](self["body"](x).tanh())


parser = argparse.ArgumentParser()
parser.add_argument("--late", default="all_reduce", help="what waits for the last micro-batch, or gradient_sync")
late = parser.parse_args().late
dist.init_process_group("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = Heads({name: nn.Linear(8, 8) for name in ("body", "first", "second")})
if ranks > 1:
    names = ("replicate", "shard")
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    for part, head in zip(batch.chunk(2), ("first", "second"), strict=True):  # two micro-batches
        if ranks > 1:
            getattr(model, f"set_requires_{late}")(head == "second")
        (model(part.chunk(ranks)[rank], head) - 1).square().mean().backward()
    if rank == 0:
        print(f"step {step}", *(f"{name} {'no ' * (p.grad is None)}gradient" for name, p in model.named_parameters()))
    optimizer.step(), optimizer.zero_grad()
