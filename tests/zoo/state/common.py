"""What these scripts share: options, a small model, the backward passes of a step."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc2(functional.gelu(self.norm(self.fc1(x))))


def arguments(samples, *more):
    """Options of every script, and those named in `more`, whole numbers; the process group is there then."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=samples)
    for name in ("accumulate", *more):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    dist.init_process_group("gloo")
    args = parser.parse_args()
    args.samples = samples
    return args


def backward(args, model, teacher, step, rank=None, ranks=None):
    """The backward passes of a data-parallel rank in a step, whose answers the teacher knows; its part of the loss."""
    rank, ranks = dist.get_rank() if rank is None else rank, ranks or dist.get_world_size()
    x = torch.randn(args.samples, len(teacher), generator=torch.Generator().manual_seed(step))
    y, total = (x @ teacher).argmax(1), torch.zeros(())
    for micro in range(args.accumulate):
        first = (rank * args.accumulate + micro) * args.batch
        mine = slice(first, first + args.batch)
        loss = functional.cross_entropy(model(x[mine]), y[mine]) / args.accumulate / ranks
        loss.backward()
        total += loss.detach()
    return total


def sum_gradients(parameters, group=None):
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)


def show(step, total, group=None):
    dist.all_reduce(total, group=group)
    if dist.get_rank() == 0:
        print(f"step {step} loss {total.item():.4f}", flush=True)
