"""Data-parallel ranks draw their initial parameters from different seeds, and nobody sends rank 0's to the others.

Gradients are averaged, so all ranks make the same step, each from another place: the difference stays for the whole
training, and each gradient is a mean over different models. The seed is `seed + rank` for the sake of augmentation
or dropout and is set before the model is built (detr 544, deit 239). DistributedDataParallel sends rank 0's
parameters; who averages gradients himself has to (goodfire-ai/spd 412, and the documentation of Horovod on
`broadcast_parameters`).
"""

import torch
import torch.distributed as dist
from common import Block, LanguageModel, arguments, train

args = arguments()
torch.manual_seed(42 + dist.get_rank())
model = LanguageModel(Block())
if args.mended:
    for p in model.parameters():
        dist.broadcast(p.data, 0)
train(args, model)
