"""Each data-parallel rank drops the same places of its samples, because all have one seed.

With one seed for all, sample i of each rank gets the same mask: dropout averages over as many masks as one rank has
samples, however many ranks there are. transformers 31412 reports major losses of quality under its Trainer with
DDP; accelerate 236 asks for a seed by rank for the same reason.
"""

import torch
import torch.distributed as dist
from common import Block, LanguageModel, arguments, train
from torch import nn

args = arguments()
torch.manual_seed(42)
model = LanguageModel(Block(), nn.Dropout(0.1))
if args.mended:
    torch.manual_seed(42 + dist.get_rank())
train(args, model)
