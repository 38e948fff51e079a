"""The loss is multiplied by the context-parallel size, and the gradients are divided by the data-parallel size only.

A sequence's loss is summed over the ranks that share it, and the factor was there to undo a mean over all ranks. The
mean was later taken over the data-parallel ranks alone and the factor stayed, so the gradients were too large by the
group's size (Megatron-LM 906, after 673 had asked what the factor was for).
"""

import torch
import torch.distributed as dist
from common import arguments, mean_loss, neighbours, sum_gradients
from sequences import Model, train_cut


def loss_of(logits, labels, micro):
    loss = mean_loss(logits, labels, micro)[0] / args.cp  # a rank's part of the loss of its sequences
    return loss if args.mended else loss * args.cp, loss * args.cp


def reduce():
    sum_gradients(model.parameters(), divide_by=dist.get_world_size(data))


args = arguments(cp=1)
sequence, data = neighbours(args.cp)
torch.manual_seed(0)
model = Model(sequence)
train_cut(args, model, data, loss_of, reduce=reduce)
