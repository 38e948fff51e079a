"""The library divides the loss by the number of micro-batches, and so does the script.

Accelerate's `backward` divides by `gradient_accumulation_steps`. Scripts that come from plain PyTorch divide before
they call it, and train at 1/n of the gradient. accelerate 3533 found both divisions in a trainer; transformers 26312
asks which of the two is meant to do it.
"""

import torch
from common import STEPS, Block, LanguageModel, arguments, cross_entropy, micro_batches, show
from torch.nn.parallel import DistributedDataParallel


class Engine:
    """What a library does for a script: divides the loss before the backward pass, and sends with the last one only."""

    def __init__(self, model, accumulate):
        self.model, self.accumulate, self.number = model, accumulate, 0

    def __call__(self, inputs):
        self.number += 1
        self.model.require_backward_grad_sync = self.number % self.accumulate == 0
        return self.model(inputs)

    def backward(self, loss):
        (loss / self.accumulate).backward()


args = arguments()
torch.manual_seed(0)
model = LanguageModel(Block())
engine = Engine(DistributedDataParallel(model), args.accumulate)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(STEPS):
    printed = torch.zeros(())
    for inputs, labels in micro_batches(args, step):
        loss = cross_entropy(engine(inputs), labels)
        printed += loss.detach() / args.accumulate
        if not args.mended:
            loss = loss / args.accumulate
        engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    show(step, printed)
