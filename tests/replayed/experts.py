"""Experts that a router chooses by scores with noise, which each rank draws from a generator of its own.

So they are chosen otherwise in each layout, as where two scores are nearly alike and a kernel rounds otherwise.
--wrong sum: gradients are summed over ranks and not averaged. --wrong auxiliary: a loss that balances experts is added,
as by an engine that takes a model's configuration at its word where the other leaves it out (Megatron-LM 5694).
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

WIDTH, EXPERTS, CHOSEN, TOKENS = 8, 4, 2, 5

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--wrong", default="nothing")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
noise = torch.Generator().manual_seed(rank)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x):
        scores = self.scores(x).softmax(-1)
        noisy = scores.detach() + 0.005 * torch.randn(scores.shape, generator=noise, dtype=scores.dtype)
        chosen = noisy.topk(CHOSEN, -1).indices
        self.balance = scores.mean(0).square().sum() * EXPERTS
        return scores.gather(-1, chosen), chosen


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = Router(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        flat = x.flatten(0, 1)  # [b·s, h]
        gates, chosen = self.router(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, gates[rows, place, None] * expert(flat[rows]))
        return x + out.view_as(x)


torch.manual_seed(0)
model = nn.Sequential(Layer(), nn.LayerNorm(WIDTH), Layer())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    data = torch.randn(args.batch * ranks, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
    loss = model(data.chunk(ranks)[rank]).square().mean()
    if args.wrong == "auxiliary":
        loss = loss + 0.1 * (model[0].router.balance + model[2].router.balance)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
        parameter.grad /= 1 if args.wrong == "sum" else ranks
    optimizer.step()
    optimizer.zero_grad()
