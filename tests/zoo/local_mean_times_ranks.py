"""The loss is a mean over the rank's own samples, and it is multiplied by the number of ranks all the same.

`loss * ranks` undoes DDP's mean where the divisor was counted over all ranks. A recipe for classification took the
line over without that divisor, and trained at ranks times the gradient (NeMo Automodel 3830, which measured 4.00 on
four ranks); sparseml 135 mended the same in 2021, ultralytics 18616 asks about it.
"""

import torch
import torch.distributed as dist
from common import Block, LanguageModel, arguments, cross_entropy, train
from torch.nn.parallel import DistributedDataParallel


def loss_of(logits, labels, micro):
    loss = cross_entropy(logits, labels) / args.accumulate
    return loss if args.mended else loss * dist.get_world_size(), loss


args = arguments()
torch.manual_seed(0)
train(args, DistributedDataParallel(LanguageModel(Block())), loss_of)
