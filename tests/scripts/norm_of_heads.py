"""A norm of each head, under tensor parallelism: with each micro-batch its accumulated gradient is summed anew.

Each rank has some of the heads, and the whole norm, so that the norm's gradient is a sum over the ranks. Summed behind
each backward pass in place, it is right with one micro-batch a step (transformers did so: docs/records/found.md,
``accumulated_norm``). ``--mended`` sums behind the last one.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--mended", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
tp, ranks, rank = args.tp, dist.get_world_size(), dist.get_rank()
if ranks // tp > 2:
    raise SystemExit(f"two replicas at most, not {ranks // tp}")
place, replica, replicas = rank % tp, rank // tp, ranks // tp
tensor = [dist.new_group(range(first, first + tp)) for first in range(0, ranks, tp)][replica]
data = [dist.new_group(range(first, ranks, tp)) for first in range(tp)][place]


class Exchange(torch.autograd.Function):
    """Sums in the forward pass (`forwards`), or in the backward pass."""

    @staticmethod
    def forward(ctx, x, forwards):
        ctx.forwards, x = forwards, x.clone()
        if forwards:
            dist.all_reduce(x, group=tensor)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if not ctx.forwards:
            dist.all_reduce(gradient, group=tensor)
        return gradient, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = torch.randn(16, 8) / 3, torch.randn(8, 16) / 4
        self.up, self.down = nn.Parameter(up.chunk(tp, 0)[place]), nn.Parameter(down.chunk(tp, 1)[place])
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        heads = (Exchange.apply(x, False) @ self.up.T).unflatten(-1, (-1, 4))  # [b, heads of this rank, 4]
        return x + Exchange.apply(torch.tanh(self.norm(heads)).flatten(-2) @ self.down.T, True)


torch.manual_seed(0)
model = nn.Sequential(*(Layer() for _ in range(args.layers)))
norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    samples = args.batch * args.accumulate * replicas
    batch = torch.randn(samples, 8, generator=torch.Generator().manual_seed(step)).chunk(replicas)[replica]
    for number, micro_batch in enumerate(batch.chunk(args.accumulate), 1):
        (model(micro_batch).square().mean() / args.accumulate).backward()
        if not args.mended or number == args.accumulate:
            for parameter in norms:
                dist.all_reduce(parameter.grad, group=tensor)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=data)
        parameter.grad /= replicas
    optimizer.step()
    optimizer.zero_grad()
