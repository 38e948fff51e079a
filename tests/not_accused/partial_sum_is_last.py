"""Tensor parallelism by hand whose last output is a rank's part of a sum, which is then scattered over tokens."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()


class Summed(torch.autograd.Function):
    """Nothing forwards, the sum of the ranks' gradients backwards."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Scattered(torch.autograd.Function):
    """Parts of a sum [b, s, h] to this rank's tokens of the sum [b, s / tp, h]."""

    @staticmethod
    def forward(ctx, x):
        whole = x.clone()
        dist.all_reduce(whole)
        return whole.chunk(args.tp, 1)[rank].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(args.tp)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 24, False), nn.Linear(24, 8, False)

    def forward(self, tokens):
        return Scattered.apply(self.down(self.up(Summed.apply(self.embed(tokens))).tanh()))


torch.manual_seed(0)
model = Model()
if args.tp > 1:
    model.up.weight = nn.Parameter(model.up.weight.detach().chunk(2, 0)[rank].clone())
    model.down.weight = nn.Parameter(model.down.weight.detach().chunk(2, 1)[rank].clone())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    out = model(torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step)))
    optimizer.zero_grad()
    (out.square().sum() / 24).backward()
    optimizer.step()
