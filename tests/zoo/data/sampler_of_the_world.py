"""Ranks of one tensor-parallel group get different samples, because the sampler asks for the rank in the whole world.

A DistributedSampler without `num_replicas` and `rank` counts all processes. Ranks that compute one model together
have to see the same samples: what they sum over their shards is otherwise the answer to no sample at all.
DeepSpeed's loader did so with model parallelism until its 99 was closed; accelerate 3092 is the same with ranks
that share a data-parallel index.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, SAMPLES = 16, 192


class CopyIn(torch.autograd.Function):
    """Identity forward, all-reduce backward: the f of the Megatron paper (arXiv 1909.08053)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return SumOut.forward(ctx, grad, ctx.group), None


class SumOut(torch.autograd.Function):
    """All-reduce forward, identity backward: the g of the Megatron paper."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Model(nn.Module):
    """A whole layer, then two that are cut over a group: the first by its outputs, the second by its inputs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.read, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)
        self.group, rank, size = group, dist.get_rank(group), dist.get_world_size(group)
        self.fc1.weight = nn.Parameter(self.fc1.weight.detach().chunk(size, 0)[rank].clone())
        self.fc2.weight = nn.Parameter(self.fc2.weight.detach().chunk(size, 1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.read(x)
        hidden = F.gelu(self.fc1(CopyIn.apply(self.norm(x), self.group)))
        return x + SumOut.apply(self.fc2(hidden), self.group)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]

    torch.manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH)
    data = TensorDataset(x, x.roll(1, dims=1))
    place = {"num_replicas": dp.size(), "rank": dp.get_local_rank()} if args.mended else {}
    loader = iter(DataLoader(data, args.batch, sampler=DistributedSampler(data, **place)))
    model = Model(mesh["tp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(6):
        given, wanted = next(loader)
        loss = F.mse_loss(model(given), wanted)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp.get_group())
            p.grad /= dp.size()
        optimizer.step()
        optimizer.zero_grad()
        printed = loss.detach().clone()
        dist.all_reduce(printed, group=dp.get_group())
        if dist.get_rank() == 0:
            print(f"step {step} loss {printed / dp.size():.4f}")
