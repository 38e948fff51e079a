"""All ranks share two layers: the first is cut by its outputs, the second by its inputs."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, mse_loss


class SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Cut(nn.Module):
    def __init__(self, first, second, rank, ranks):
        super().__init__()
        self.first, self.second = nn.Linear(8, 32 // ranks), nn.Linear(32 // ranks, 1)
        self.first.weight.data = first.weight.data.chunk(ranks, 0)[rank].clone()
        self.first.bias.data = first.bias.data.chunk(ranks, 0)[rank].clone()
        self.second.weight.data = second.weight.data.chunk(ranks, 1)[rank].clone()
        self.second.bias.data = second.bias.data.clone()

    def forward(self, x):
        part = linear(self.first(x).tanh(), self.second.weight, self.second.bias)
        return SumParts.apply(part)


parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16, help="samples of a step, the same on all ranks")
batch = parser.parse_args().batch
dist.init_process_group("gloo")
torch.manual_seed(0)
model = Cut(nn.Linear(8, 32), nn.Linear(32, 1), dist.get_rank(), dist.get_world_size())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(6):
    x = torch.randn(batch, 8, generator=torch.Generator().manual_seed(step))
    loss = mse_loss(model(x), x.sin().sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(step, f"{loss.item():.4f}", flush=True)
dist.destroy_process_group()
