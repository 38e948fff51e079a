"""A pipeline whose stages number their layers from 0 on, as Megatron-core's do; a part of each has no parameters."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--pp", type=int, default=1)
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.same = nn.Linear(8, 8), nn.Identity()

    def forward(self, x):
        return x + self.same(torch.tanh(self.linear(x)))


class Stage(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


blocks = [Block() for _ in range(2)]
model = Stage(blocks if args.pp == 1 else blocks[rank : rank + 1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    if rank:
        x = torch.zeros_like(x).requires_grad_()
        dist.recv(x.data, 0)
    out = model(x)
    if args.pp == 1 or rank == 1:
        nn.functional.mse_loss(out, y).backward()
        if rank:
            dist.send(x.grad, 0)
    else:
        dist.send(out.detach(), 1)
        back = torch.zeros_like(out)
        dist.recv(back, 1)
        out.backward(back)
    optimizer.step()
