"""The first and the last stage share a table of embeddings, whose two copies begin with different numbers.

Their gradients are summed in each step, so that the difference stays. In PaddleNLP's pipelines the shared weights
were made equal when the stages were built, and then each stage drew its weights anew (7772, 7775). Here each
parameter is drawn from a seed made of its name, so that the start does not depend on the layout; but on the last
stage the table has another name.
"""

import zlib

import torch
import torch.distributed as dist
from common import arguments, average_gradients, neighbours, sum_gradients, train
from stages import Stage, backward


@torch.no_grad()
def initialize(stage):
    """Draws each matrix of a stage from a seed of its own."""
    for name, parameter in stage.named_parameters():
        if parameter.dim() == 2:
            torch.manual_seed(zlib.crc32(name.encode()))
            parameter.normal_(std=parameter.shape[1] ** -0.5)
        elif "norm" not in name:
            parameter.zero_()


def reduce():
    sum_gradients(stage.tied, pipeline)
    average_gradients(stage.parameters(), data)


args = arguments(pp=1)
pipeline, data = neighbours(args.pp)
stage = Stage(dist.get_rank(pipeline), args.pp)
initialize(stage)
if args.mended:
    dist.broadcast(stage.tied[0].data, group_src=0, group=pipeline)
train(args, stage, group=data, reduce=reduce, backward=backward)
