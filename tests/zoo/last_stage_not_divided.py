"""A pipeline's micro-batches are summed where their mean is meant: no stage divides by their number.

Without a pipeline the training loop divides each micro-batch's loss by their number; in a pipeline the schedule runs
the backward pass, and the division has to be made there. In DeepSpeed 7773 the norm of the gradients was 4 times too
large with 4 times as many micro-batches; torchtitan 2972 divides after the backward pass, for the printed loss only,
and asks the schedule for ``scale_grads=False`` as here.
"""

import torch
import torch.distributed as dist
from common import STEPS, arguments, backward, cross_entropy, micro_batches, neighbours, show, text
from stages import Stage
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

args = arguments(pp=1)
rank, (_, data) = dist.get_rank(), neighbours(args.pp)
torch.manual_seed(0)
model = Stage(rank, args.pp, tied=False)
if args.pp > 1:
    part = PipelineStage(model, rank, args.pp, torch.device("cpu"))
    schedule = ScheduleGPipe(part, args.accumulate, loss_fn=cross_entropy, scale_grads=args.mended)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    optimizer.zero_grad()
    tokens, labels = text(step, args.batch * args.accumulate)
    losses = []
    if args.pp == 1:
        losses.append(backward(model, micro_batches(args, step)))
    elif model.first:
        schedule.step(tokens)
    else:
        schedule.step(target=labels, losses=losses)
    optimizer.step()
    show(step, torch.stack(losses).detach().mean() * args.pp if losses else torch.zeros(()))
