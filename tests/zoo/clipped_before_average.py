"""Each data-parallel rank clips its own gradients before they are averaged: ranks with large gradients lose weight.

The mean of clipped gradients is not the clipped mean: its norm is below the limit and its direction another one,
and both change with the number of ranks. Accelerate's `clip_grad_norm_` was called so while gradients were not
synchronised yet (accelerate 641); the training script of diffusers did it until its 721.
"""

import torch
from common import Block, LanguageModel, arguments, average_gradients, train
from torch import nn


def reduce():
    if args.mended:
        average_gradients(model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if not args.mended:
        average_gradients(model.parameters())


args = arguments()
torch.manual_seed(0)
model = LanguageModel(Block())
train(args, model, reduce=reduce, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
