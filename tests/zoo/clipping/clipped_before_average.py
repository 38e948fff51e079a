"""Each data-parallel rank clips its own gradients before they are averaged: ranks with large gradients lose weight.

The mean of clipped gradients is not the clipped mean: its norm is below the limit and its direction another one,
and both change with the number of ranks. Accelerate's `clip_grad_norm_` was called so while gradients were not
synchronised yet (accelerate 641); the training script of diffusers did it until its 721.
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
        if last and args.mended:
            average_gradients(model, dist.group.WORLD)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        elif last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            average_gradients(model, dist.group.WORLD)

    train(args, model, after, dist.group.WORLD)
