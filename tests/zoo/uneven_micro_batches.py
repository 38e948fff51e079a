"""Uneven micro-batches of a pipeline weigh the same: samples of the last, smaller one count for more.

A batch of 50 cut into micro-batches of 20, 20 and 10 gives three means, and the last stage takes the mean of these;
each of the last ten samples then weighs 1/30 instead of 1/50. Uneven micro-batches in PyTorch's
pipelining: pytorch 126600; equal weights of unequal micro-batches, with a loss that looks right: Soup 932, keras
20241.
"""

import torch
import torch.distributed as dist
from common import arguments, cross_entropy, neighbours, text, train
from stages import Stage, backward

SAMPLES = 50


def loss_of(logits, labels, micro):
    loss = cross_entropy(logits, labels) * (len(labels) / SAMPLES if args.mended else 1 / len(micro))
    return loss, loss


args = arguments(pp=1)
pipeline, data = neighbours(args.pp)
torch.manual_seed(0)
stage = Stage(dist.get_rank(pipeline), args.pp, tied=False)
train(args, stage, loss_of, batch=lambda step, _: text(step, SAMPLES), group=data, backward=backward)
