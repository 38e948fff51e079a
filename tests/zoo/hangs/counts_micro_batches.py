"""Micro-batches are packed by tokens on each rank: rank 1 needs two where rank 0 needs three, and is a gather behind.

verl-project/verl#6176: the number of micro-batches was not agreed upon, since the group was never passed on; the rank
with more waited in FSDP's all-gather. Mended: the largest number counts for all, and who has fewer runs padding.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def packed(lengths, limit=100):
    """How many micro-batches of at most so many tokens."""
    count, used = 1, 0
    for length in lengths:
        count, used = (count, used + length) if used + length <= limit else (count + 1, length)
    return count


dist.init_process_group("gloo")
count = packed([[60, 50, 60], [60, 40, 60]][dist.get_rank()])
if "--mended" in sys.argv:
    most = torch.tensor(count)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    count = int(most)

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    for _ in range(count):
        output = model(torch.randn(4, 16))
        output.square().mean().backward()
    optimizer.step()
