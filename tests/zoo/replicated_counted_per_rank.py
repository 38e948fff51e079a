"""What is whole on each tensor-parallel rank is counted once for each rank in the norm, which is too large.

The squares of all gradients are summed over the tensor-parallel group, which is right for what is cut. Norms,
biases and the head are whole on each rank, and their squares are summed as often as there are ranks: clipping sets
in earlier than it should, more so the more ranks there are (NVIDIA-NeMo RL 3788).
"""

import torch
import torch.distributed as dist
from common import LanguageModel, arguments, average_gradients, neighbours, train
from cut_layers import Block
from torch import nn


def clip(max_norm):
    square = torch.zeros(())
    for p in model.parameters():
        once = hasattr(p, "is_cut") or not args.mended or dist.get_rank(tensor) == 0
        square += p.grad.square().sum() * once
    dist.all_reduce(square, group=tensor)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())


def reduce():
    average_gradients(model.parameters(), data)
    clip(0.1)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(0)
model = LanguageModel(Block(tensor), Block(tensor))
train(args, model, group=data, reduce=reduce, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
