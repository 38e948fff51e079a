"""Rank 1 is told to end, and its signal handler saves, which ends with a barrier; the others know nothing of it.

Lightning-AI/pytorch-lightning#20825: a SIGTERM that one rank received ended in a deadlock, since the others went on to
their next step. Mended: the handler sets a flag, which all ranks ask for together at the end of a step.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def save():
    dist.barrier()


def handler(number, frame):
    if "--mended" in sys.argv:
        stop.fill_(1.0)
    else:
        save()


dist.init_process_group("gloo")
stop = torch.zeros(1)
signal.signal(signal.SIGTERM, handler)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if "--mended" in sys.argv:
        dist.all_reduce(stop)
        if stop > 0:
            save()
            stop.zero_()
