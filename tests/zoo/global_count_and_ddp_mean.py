"""The loss is divided by the labels of all ranks, and DDP divides by the number of ranks once more.

The number of labels is summed over the ranks, as it should be; the mean that DDP takes of the gradients is forgotten.
With W ranks one trains at 1/W of the gradient, which clipping and Adam hide for a long time: verl-SpeCo 29 (July
2026). transformers has a line of its own against it, `loss *= world_size` (transformers 34373).
"""

import torch
import torch.distributed as dist
from common import Block, LanguageModel, answers, arguments, cross_entropy, labelled, over_ranks, train
from torch.nn.parallel import DistributedDataParallel


def loss_of(logits, labels, micro):
    loss = cross_entropy(logits, labels, reduction="sum") / over_ranks(labelled(micro))
    times = dist.get_world_size()
    return loss * times if args.mended else loss, loss * times


args = arguments()
torch.manual_seed(0)
train(args, DistributedDataParallel(LanguageModel(Block())), loss_of, batch=answers)
