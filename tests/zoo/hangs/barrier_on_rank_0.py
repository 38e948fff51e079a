"""A checkpoint is saved by rank 0 only, and saving ends with a barrier: the others are in the next step's all-reduce.

alan-turing-institute/autocast#386: ``save_checkpoint`` is a collective, since it ends in a barrier, and was called
under ``if trainer.is_global_zero``. Mended: all ranks call it, and rank 0 writes.
"""

import io
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def save(model):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), io.BytesIO())
    dist.barrier()


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1 and (dist.get_rank() == 0 or "--mended" in sys.argv):
        save(model)
