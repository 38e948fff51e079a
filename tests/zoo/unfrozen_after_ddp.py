"""The backbone is unfrozen after DDP was built, which reduces only what was trained when it was built.

DDP's documentation warns of it ("gradient reduction functions no longer match the correct set of parameters"), and
nothing raises: each rank goes on with a backbone of its own, trained on its own samples. So it is with Lightning's
BackboneFinetuning (Lightning-AI/pytorch-lightning 20340): the validation loss fell on rank 0 and rose on the others.
Mended, DDP is built anew.
"""

import torch
from common import STEPS, Block, LanguageModel, arguments, backward, micro_batches, show
from torch.nn.parallel import DistributedDataParallel

args = arguments()
torch.manual_seed(10)
model = LanguageModel(Block())
model.blocks.requires_grad_(False)  # the backbone
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for step in range(STEPS):
    if step == 1:
        model.blocks.requires_grad_(True)
        if args.mended:
            ddp = DistributedDataParallel(model)
    optimizer.zero_grad()
    total = backward(ddp, micro_batches(args, step))
    optimizer.step()
    show(step, total)
