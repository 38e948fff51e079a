"""Each tensor-parallel rank clips by the norm of its own shards: those of one matrix are scaled differently.

`clip_grad_norm_` knows the tensors that it is given. Where parameters are cut, a rank gives it a part of them, and
the norm is too small and another one on each rank: gradients are clipped too little, and what is whole on each rank
drifts apart. PyTorch wrote a `clip_grad_norm_` of its own for FSDP for this reason (pytorch 72548); torchtitan
clipped by the norm of a pipeline's stage until its 649 (torchtitan 596).
"""

import torch
import torch.distributed as dist
from common import LanguageModel, arguments, average_gradients, neighbours, train
from cut_layers import Block
from torch import nn


def clip(max_norm):
    if not args.mended:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return
    cut = [p.grad for p in model.parameters() if hasattr(p, "is_cut")]
    whole = [p.grad for p in model.parameters() if not hasattr(p, "is_cut")]
    square = nn.utils.get_total_norm(cut) ** 2
    dist.all_reduce(square, group=tensor)
    norm = (square + nn.utils.get_total_norm(whole) ** 2).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)


def reduce():
    average_gradients(model.parameters(), data)
    clip(0.1)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(0)
model = LanguageModel(Block(tensor), Block(tensor))
train(args, model, group=data, reduce=reduce, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
