"""A group is made by its members only, as seems natural; the next one, of all ranks, has another name on each side.

pytorch/pytorch#25390: ``new_group`` has to be called by all processes of the job, in the same order, also by those that
are not in the group. Mended: all call it.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank < 2 or "--mended" in sys.argv:
    pair = dist.new_group([0, 1])
everybody = dist.new_group([0, 1, 2])

model = DistributedDataParallel(torch.nn.Linear(16, 4), process_group=everybody)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if rank < 2:
        dist.all_reduce(loss.detach(), group=pair)
    optimizer.step()
