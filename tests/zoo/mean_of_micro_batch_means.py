"""Micro-batches weigh alike, however many labels each of them has.

Each micro-batch's loss is the mean over its own labels, divided by the number of micro-batches. With answers of
different lengths this is not the mean over the step's labels. Trainers did it for years until it was seen in October
2024 (transformers 34191 and 34198; unsloth 1134): the loss of "batch 32" and of "batch 1, accumulated 32 times"
parted.
"""

import torch
import torch.distributed as dist
from common import Block, LanguageModel, answers, arguments, cross_entropy, labelled, over_ranks, train
from torch.nn.parallel import DistributedDataParallel


def loss_of(logits, labels, micro):
    if args.mended:  # DDP averages over ranks what has to be summed
        loss = cross_entropy(logits, labels, reduction="sum") / over_ranks(labelled(micro)) * dist.get_world_size()
    else:
        loss = cross_entropy(logits, labels) / args.accumulate
    return loss, loss


args = arguments()
torch.manual_seed(0)
train(args, DistributedDataParallel(LanguageModel(Block())), loss_of, batch=answers)
