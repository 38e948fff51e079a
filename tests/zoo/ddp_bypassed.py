"""The training step calls the module inside DDP instead of DDP, and no gradient is reduced.

DDP gets its reduction ready in its own forward; a call of `ddp.module`, usual for a method such as `compute_loss`,
goes past it. Each rank trains a model of its own, and rank 0's is saved. OpenTSLM trained its curriculum so (OpenTSLM
49), and Intel's domain adapter its two networks (intel/e2eAIOK 197, 198).
"""

import torch
from common import Block, LanguageModel, arguments, train
from torch.nn.parallel import DistributedDataParallel

args = arguments()
torch.manual_seed(13)
ddp = DistributedDataParallel(LanguageModel(Block()))
train(args, ddp if args.mended else ddp.module, reduce=lambda: None)
