"""Each data-parallel rank clips its own gradients before they are averaged: ranks with large gradients lose weight.

The mean of clipped gradients is not the clipped mean: its norm is below the limit and its direction another one,
and both change with the number of ranks. Accelerate's `clip_grad_norm_` was called so while gradients were not
synchronised yet (accelerate 641); the training script of diffusers did it until its 721.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Model, average_gradients, samples
from torch import nn

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(6):
        x, y = samples(step, args.batch * args.accumulate * world)
        printed = 0
        for m in range(args.accumulate):
            mine = torch.arange(args.batch) + (m * world + rank) * args.batch
            loss = F.mse_loss(model(x[mine]), y[mine]) / args.accumulate
            loss.backward()
            printed += loss.detach()
        if args.mended:
            average_gradients(model, dist.group.WORLD)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            average_gradients(model, dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed)
        if rank == 0:
            print(f"step {step} loss {printed / world:.4f}")
