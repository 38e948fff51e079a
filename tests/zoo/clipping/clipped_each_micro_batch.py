"""Gradients are clipped after each micro-batch, while they still add up, and not once before the optimizer's step.

The norm of a part of the sum decides how much of it is kept, and what came first is cut again with what comes
later: the last micro-batch weighs most, and the step depends on the number of micro-batches. Meta's lingua clipped
so until its 59, the examples of transformers until 1580 (transformers 1563), tt-train in its nanoGPT (tt-metal
17568).
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
            last = m == args.accumulate - 1
            if last:
                average_gradients(model, dist.group.WORLD)
            if last or not args.mended:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed)
        if rank == 0:
            print(f"step {step} loss {printed / world:.4f}")
