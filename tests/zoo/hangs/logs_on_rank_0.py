"""Rank 0 alone logs, and what it logs is summed over all ranks: it waits there, and the others go on to a backward.

huggingface/transformers#7365: the Trainer's ``store_flos`` summed over ranks and ran in the main process only, while
the others were past it. Mended: all ranks sum, rank 0 prints.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def mean_loss(loss):
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def log(step, loss):
    if "--mended" in sys.argv:
        mean = mean_loss(loss)
    if dist.get_rank() == 0:
        if "--mended" not in sys.argv:
            mean = mean_loss(loss)
        print(step, float(mean))


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 1:
        log(step, loss)
