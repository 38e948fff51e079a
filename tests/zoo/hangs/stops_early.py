"""Each rank decides by its own loss whether training is over: rank 1 leaves the loop, and the others wait for it.

Lightning-AI/pytorch-lightning#379: the stop condition was met in some processes only; these stopped, the others hung.
Mended: the ranks decide by the mean.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(9):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    measured = torch.tensor(float("nan") if (rank, step) == (1, 1) else 1.0)
    if "--mended" in sys.argv:
        measured = measured.nan_to_num(0.0)
        dist.all_reduce(measured)
    if not measured.isfinite():
        break
