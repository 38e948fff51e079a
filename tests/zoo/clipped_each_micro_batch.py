"""Gradients are clipped after each micro-batch, while they still add up, and not once before the optimizer's step.

The norm of a part of the sum decides how much of it is kept, and what came first is cut again with what comes
later: the last micro-batch weighs most, and the step depends on the number of micro-batches. Meta's lingua clipped
so until its 59, the examples of transformers until 1580 (transformers 1563), tt-train in its nanoGPT (tt-metal
17568).
"""

import torch
from common import STEPS, Block, LanguageModel, arguments, average_gradients, mean_loss, micro_batches, show
from torch import nn

args = arguments()
torch.manual_seed(0)
model = LanguageModel(Block())
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for step in range(STEPS):
    printed, micro = torch.zeros(()), micro_batches(args, step)
    for number, (inputs, labels) in enumerate(micro, 1):
        loss, _ = mean_loss(model(inputs), labels, micro)
        loss.backward()
        printed += loss.detach()
        if number == len(micro):
            average_gradients(model.parameters())
        if number == len(micro) or not args.mended:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    show(step, printed)
