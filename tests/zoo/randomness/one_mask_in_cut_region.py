"""Dropout inside attention drops the same places on each tensor-parallel rank, so that heads lose the same positions.

Tensor-parallel ranks have to agree on dropout of what is whole on each of them, so they get one seed. The same
generator then draws for the heads that each rank has for itself, and head 2 loses what head 0 loses. The Megatron
paper gives the cut regions a generator of their own (arXiv 1909.08053, appendix B.2); tt-train seeds one for all
(tt-metal 55947).
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ColumnLinear, RandomState, RowLinear, average_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, HEADS, LENGTH = 16, 4, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (ColumnLinear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.attention_dropout, self.out = nn.Dropout(0.2), RowLinear(WIDTH, WIDTH)
        self.cut_region = nullcontext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)  # [b, heads of this rank, s, s]
        with self.cut_region():
            weights = self.attention_dropout(weights)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.dropout = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.attention(self.norm(x)))


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
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            module.cut(tp.get_group())
        if isinstance(module, Attention) and args.mended:
            module.cut_region = random_state
    torch.manual_seed(100 + dp.get_local_rank())  # one seed for the ranks of a tensor-parallel group
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(args.batch * args.accumulate * dp.size(), LENGTH, WIDTH, generator=generator)
        printed = 0
        for m in range(args.accumulate):
            mine = x[torch.arange(args.batch) + (m * dp.size() + dp.get_local_rank()) * args.batch]
            loss = F.mse_loss(model(mine), mine.mean(1, keepdim=True) - mine) / args.accumulate
            loss.backward()
            printed += loss.detach()
        average_gradients(model, dp.get_group())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed, group=dp.get_group())
        if dist.get_rank() == 0:
            print(f"step {step} loss {printed / dp.size():.4f}")
