"""Gradients are clipped after each micro-batch, while they still add up, and not once before the optimizer's step.

The norm of a part of the sum decides how much of it is kept, and what came first is cut again with what comes
later: the last micro-batch weighs most, and the step depends on the number of micro-batches. Meta's lingua clipped
so until its 59, the examples of transformers until 1580 (transformers 1563), tt-train in its nanoGPT (tt-metal
17568).
"""

import torch
import torch.distributed as dist
from common import Model, arguments, average_gradients, train
from torch import nn

if __name__ == "__main__":
    args = arguments()
    torch.manual_seed(0)
    model = Model()

    def after(last: bool) -> None:
        if last:
            average_gradients(model, dist.group.WORLD)
        if last or not args.mended:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    train(args, model, after, dist.group.WORLD)
