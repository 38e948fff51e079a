"""The last batch has seven samples on rank 0 and five on rank 1, and both gather them as if they had equally many.

pytorch/pytorch#156627: ``all_gather`` takes tensors of uneven sizes with nccl, as its page says, and not with gloo; in
other libraries (pytorch/xla#8660) it hangs. Mended: padded to the longest, cut afterwards.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    samples = [7, 5][rank] if step == 1 else 8
    output = model(torch.randn(samples, 16))
    optimizer.zero_grad()
    output.square().mean().backward()
    optimizer.step()
    given = output.detach()
    if "--mended" in sys.argv:
        most = torch.tensor(samples)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        given = torch.nn.functional.pad(given, (0, 0, 0, int(most) - samples))
    gathered = torch.empty(2 * len(given), 4)
    dist.all_gather_into_tensor(gathered, given.contiguous())
