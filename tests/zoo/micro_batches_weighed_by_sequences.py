"""A token's weight depends on the micro-batch that it fell into: means over tokens, weighed by numbers of sequences.

Reinforcement learning with DAPO's loss (arXiv 2503.14476) wants a mean over all tokens of the step. Micro-batches
took the mean over their own tokens and were weighed by their share of the sequences, so that micro-batches of one
sequence make it a mean over sequences: trl 3938 (only one rank without accumulation was DAPO before it), verl 7200
and 7321.
"""

import torch
import torch.distributed as dist
from common import Block, LanguageModel, answers, arguments, cross_entropy, labelled, over_ranks, train
from torch.nn.parallel import DistributedDataParallel


def with_advantages(step, samples):
    advantages = 0.5 + torch.rand(samples, 1, generator=torch.Generator().manual_seed(2000 + step))
    return *answers(step, samples), advantages


def loss_of(logits, labels, good, micro):
    surprise = cross_entropy(logits, labels, reduction="none").view_as(labels)  # [b, s], 0 if ignored
    loss = (surprise * good).sum()
    if args.mended:
        loss = loss / over_ranks(labelled(micro)) * dist.get_world_size()  # DDP takes the mean, the sum is meant
    else:
        loss = loss / labelled([(None, labels)]) / len(micro)
    return loss, loss


args = arguments()
torch.manual_seed(0)
train(args, DistributedDataParallel(LanguageModel(Block())), loss_of, batch=with_advantages)
