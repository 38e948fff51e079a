"""Ranks weigh alike, however many labels each of them has: right under accumulation, wrong under data parallelism.

Each rank divides by the labels of all its own micro-batches, and DDP averages over the ranks. torchtune 1917 derives
why data parallelism needs the same care as accumulation; transformers 34242 asked for it after accumulation was
mended, and torchtitan 2206 mended it in January 2026.
"""

import torch
import torch.distributed as dist
from common import Block, LanguageModel, answers, arguments, cross_entropy, labelled, over_ranks, train
from torch.nn.parallel import DistributedDataParallel


def loss_of(logits, labels, micro):
    divisor = labelled(micro)
    if args.mended:  # DDP divides by the ranks once more
        divisor = over_ranks(divisor) / dist.get_world_size()
    loss = cross_entropy(logits, labels, reduction="sum") / divisor
    return loss, loss


args = arguments()
torch.manual_seed(0)
train(args, DistributedDataParallel(LanguageModel(Block())), loss_of, batch=answers)
