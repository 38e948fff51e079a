"""The gradients' norm counts the experts of one rank only, so that gradients are clipped too little.

What is whole on each rank is counted on the group's first rank alone; what is cut carries a mark and is counted on
each. Experts stand on one rank each and have no such mark, so the experts of all other ranks are missing from the
norm. Megatron-core had this where tensor and expert parallelism met (Megatron-LM 5916; 2263 asks about the scope of
the sum).
"""

import torch
import torch.distributed as dist
from common import LanguageModel, arguments, neighbours, sum_gradients, train
from cut_layers import ExpertBlock
from torch import nn


def clip(max_norm):
    counted = [p.grad for p in model.parameters() if dist.get_rank(expert) == 0 or hasattr(p, "is_cut")]
    square = nn.utils.get_total_norm(counted) ** 2
    dist.all_reduce(square, group=expert)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())


def reduce():
    for name, parameter in model.named_parameters():  # experts have the gradient of all ranks' samples
        group = same_experts if ".experts." in name else dist.group.WORLD
        sum_gradients([parameter], group, dist.get_world_size())
    clip(0.1)


args = arguments(ep=1)
expert, same_experts = neighbours(args.ep)
torch.manual_seed(0)
model = LanguageModel(ExpertBlock(expert))
if not args.mended:
    for p in model.blocks[0].experts.parameters():
        del p.is_cut
train(args, model, reduce=reduce, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
