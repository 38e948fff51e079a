"""Gradients that are clipped together, or in two groups by the norm of all; the loss may be multiplied by a number."""

import argparse

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--groups", type=int, default=1)
parser.add_argument("--divide", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    for x in torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).chunk(args.accumulate):
        (model(x).square().mean() / (args.accumulate if args.divide else 1)).backward()
    parameters = list(model.parameters())
    total = get_total_norm([one.grad for one in parameters])
    for group in (parameters[::2], parameters[1::2]) if args.groups == 2 else (parameters,):
        clip_grads_with_norm_(group, 0.005, total)
    optimizer.step()
    optimizer.zero_grad()
