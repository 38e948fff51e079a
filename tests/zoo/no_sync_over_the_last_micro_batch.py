"""DDP reduces gradients in the first micro-batch of a step, and not in the last.

The first micro-batch's gradients become a mean over the ranks, and what the others add stays on its rank. FunASR's
trainer asked `batch_idx % accum_grad` where `(batch_idx + 1) % accum_grad` was meant (modelscope/FunASR 3472);
without accumulation the two are the same.
"""

import contextlib

import torch
from common import STEPS, Block, LanguageModel, arguments, cross_entropy, micro_batches, show
from torch.nn.parallel import DistributedDataParallel

args = arguments()
torch.manual_seed(12)
model = DistributedDataParallel(LanguageModel(Block()))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for step in range(STEPS):
    optimizer.zero_grad()
    total = torch.zeros(())
    for index, (inputs, labels) in enumerate(micro_batches(args, step)):
        synchronize = (index + 1 if args.mended else index) % args.accumulate == 0
        with contextlib.nullcontext() if synchronize else model.no_sync():
            loss = cross_entropy(model(inputs), labels) / args.accumulate
            loss.backward()
        total += loss.detach()
    optimizer.step()
    show(step, total)
