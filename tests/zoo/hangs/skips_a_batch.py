"""Rank 1's shard of the data is one batch shorter: its epoch ends first, and rank 0 waits in DDP's all-reduce.

pytorch/pytorch#141069: an IterableDataset of unequal lengths; the longer rank froze in the last batch, until the
watchdog ended it. Mended: all ranks take as many batches as the shortest has.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
batches = [3, 2][dist.get_rank()]
if "--mended" in sys.argv:
    fewest = torch.tensor(batches)
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
    batches = int(fewest)

model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    total = torch.zeros(1)
    for _ in range(batches):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
