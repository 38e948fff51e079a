"""The loss is a sum over samples, and DDP averages its gradient over ranks.

DDP divides by the number of ranks, which is right for a loss that is a mean over a rank's samples. A loss that sums
has to undo it. fairseq multiplies the gradients by the number of ranks for this reason, to the surprise of its
readers (fairseq 494), and verl does the same to a sum that is divided by a constant (verl 5366).
"""

import torch
import torch.distributed as dist
from common import Block, LanguageModel, answers, arguments, cross_entropy, train
from torch.nn.parallel import DistributedDataParallel


def loss_of(logits, labels, micro):
    loss, times = cross_entropy(logits, labels, reduction="sum"), dist.get_world_size()
    return loss * times if args.mended else loss, loss * times


args = arguments()
torch.manual_seed(0)
train(args, DistributedDataParallel(LanguageModel(Block())), loss_of, batch=answers)
