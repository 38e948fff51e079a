"""A rank whose labels are all ignored adds nothing, and yet the mean over ranks counts it.

With prompts longer than the sequence some ranks have no label left in a step. The mean over no labels is NaN, so the
divisor is kept at 1 or more, as OLMo-core 657 does: NaN is gone, and every other rank's gradient is too small.
transformers 39392 has the like: one label on one rank, a full row on the other, and both weigh one half.
"""

import torch
import torch.distributed as dist
from common import IGNORED, Block, LanguageModel, arguments, cross_entropy, labelled, over_ranks, text, train
from torch.nn.parallel import DistributedDataParallel


def with_prompts(step, samples):
    tokens, labels = text(step, samples)
    labels.chunk(4)[step % 4].fill_(IGNORED)  # a quarter of the samples is all prompt
    return tokens, labels


def loss_of(logits, labels, micro):
    divisor = labelled(micro).clamp(min=1)
    if args.mended:  # DDP divides by the ranks once more
        divisor = over_ranks(labelled(micro)) / dist.get_world_size()
    loss = cross_entropy(logits, labels, reduction="sum") / divisor
    return loss, loss


args = arguments()
torch.manual_seed(0)
train(args, DistributedDataParallel(LanguageModel(Block())), loss_of, batch=with_prompts)
