"""Two groups, in one order on rank 0 and in the other on rank 1: each waits in its own, and neither comes to the other.

meta-pytorch/torchrec#4149: collectives of two process groups were issued in an order that depended on the rank, and a
synchronisation between them made a circle of ranks that waited. Mended: one order for all.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
shards, replicas = dist.new_group([0, 1]), dist.new_group([0, 1])
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def sum_shards():
    dist.all_reduce(torch.ones(100), group=shards)


def sum_replicas():
    dist.all_reduce(torch.ones(100), group=replicas)


first, then = sum_shards, sum_replicas
if dist.get_rank() == 1 and "--mended" not in sys.argv:
    first, then = then, first
for step in range(9):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1:
        first()
        then()
