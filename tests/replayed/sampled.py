"""Models that draw while they run, trained on samples that ranks take in turn; --how says what is drawn.

noise: of each sample, in a layer whose forward pass the backward pass runs again. layers: whether a layer is left out,
for all samples of a micro-batch. critic: nothing, but two models are trained, each by a backward pass of its own, on
samples that another process draws.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--accumulate", type=int)
parser.add_argument("--how")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.noise = None

    def inner(self, x):
        hidden = self.up(x)
        if args.how == "noise":
            noise, before = torch.randn_like(hidden), self.noise
            assert before is None or torch.equal(noise, before), "what is computed again is not the same"
            self.noise = noise if before is None else None
            hidden = hidden + noise
        return self.down(hidden)

    def forward(self, x):
        if args.how == "layers" and torch.rand(()) < 0.5:
            return x
        return x + checkpoint(self.inner, x, use_reentrant=False)


torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(), Layer()) for _ in range(1 + (args.how == "critic"))]
parameters = [parameter for model in models for parameter in model.parameters()]
optimizer = torch.optim.SGD(parameters, 0.1)
torch.manual_seed(rank + ranks)
draw = np.random.default_rng(rank + ranks)
for step in range(3):
    samples = torch.randn(args.batch * args.accumulate * ranks, WIDTH, generator=torch.Generator().manual_seed(step))
    samples = samples.chunk(ranks)[rank] if args.how == "layers" else samples[rank::ranks]
    if args.how == "critic":
        samples = torch.from_numpy(draw.standard_normal(samples.shape)).to(samples.dtype)
    for part in samples.split(args.batch):
        for power, model in enumerate(models, 2):
            (model(part).abs() ** power).mean().div(args.accumulate).backward()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step()
    optimizer.zero_grad()
