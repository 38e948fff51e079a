"""The first stage cuts its batch into four micro-batches, the last expects two: a send finds nobody who receives it.

pytorch/PiPPy#964 says why that is easily had: a stage in the middle gets no micro-batches as input, so that it has to
be told how many there are. Mended: the last stage counts as the first does.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
batch, micro_batch = 8, 2 if rank == 0 or "--mended" in sys.argv else 4
stage_module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, batch // micro_batch, loss_fn=F.mse_loss)
optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(torch.randn(batch, 16))  # stage 0
    else:
        schedule.step(target=torch.zeros(2 * batch // micro_batch, 16))  # stage 1
    optimizer.step()
