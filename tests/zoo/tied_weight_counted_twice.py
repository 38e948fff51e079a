"""A weight that the first and the last stage of a pipeline share is counted twice in the gradients' norm.

The embedding stands on the first stage and, as the head, on the last; its gradient is summed over both, so each has
it whole. The squares of all stages' gradients are then summed, the shared one twice: the norm is up to √2 too large
and all gradients are clipped too much (Megatron-LM 7227: 40 for 28.28 with Megatron-FSDP; Megatron's own optimizer
leaves the copy out).
"""

import torch
import torch.distributed as dist
from common import arguments, neighbours, sum_gradients, train
from stages import Stage, backward
from torch import nn


def clip(max_norm):
    copies = [] if stage.first or not args.mended else stage.tied
    counted = [p.grad for p in stage.parameters() if all(p is not copy for copy in copies)]
    square = nn.utils.get_total_norm(counted) ** 2
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(stage.parameters(), max_norm, square.sqrt())


def reduce():
    sum_gradients(stage.tied, pipeline)
    clip(0.1)


args = arguments(pp=1)
pipeline, data = neighbours(args.pp)
torch.manual_seed(0)
stage = Stage(dist.get_rank(pipeline), args.pp)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
train(args, stage, group=data, reduce=reduce, optimizer=optimizer, backward=backward)
