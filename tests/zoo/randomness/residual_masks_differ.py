"""Dropout of the residual stream, which is whole on each tensor-parallel rank, drops other places on each of them.

Ranks were given a seed each, which is right inside a layer that is cut and right for data parallelism. Behind the
layer's sum all ranks of a tensor-parallel group have the same values, and have to drop the same ones: from there on
each computes with another stream, and what they add up in the next layer belongs to no model. slapo 21 states both
rules; the Megatron paper (arXiv 1909.08053, appendix B.2) seeds all ranks of a group alike for this dropout.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ColumnLinear, RandomState, RowLinear, average_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), ColumnLinear(WIDTH, 64), RowLinear(64, WIDTH)
        self.hidden_dropout, self.residual_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.cut_region = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.fc1(self.norm(x)))
        with self.cut_region():
            hidden = self.hidden_dropout(hidden)
        return x + self.residual_dropout(self.fc2(hidden))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]

    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("first", Block())
    model.add_module("second", Block())
    random_state = RandomState(1000 + dist.get_rank())
    for block in model:
        block.fc1.cut(tp.get_group())
        block.fc2.cut(tp.get_group())
        block.cut_region = random_state
    torch.manual_seed(100 + (dp.get_local_rank() if args.mended else dist.get_rank()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(args.batch * args.accumulate * dp.size(), WIDTH, generator=generator)
        printed = 0
        for m in range(args.accumulate):
            mine = x[torch.arange(args.batch) + (m * dp.size() + dp.get_local_rank()) * args.batch]
            loss = F.mse_loss(model(mine), mine.roll(1, dims=1)) / args.accumulate
            loss.backward()
            printed += loss.detach()
        average_gradients(model, dp.get_group())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed, group=dp.get_group())
        if dist.get_rank() == 0:
            print(f"step {step} loss {printed / dp.size():.4f}")
