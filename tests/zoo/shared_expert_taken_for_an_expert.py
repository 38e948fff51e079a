"""The shared expert's gradient is summed like an expert's, not over the expert-parallel ranks.

Experts are cut over neighbouring ranks and get their sum from the tokens that come to them. A shared expert is on
every rank and sees that rank's tokens only. Taken for an expert (here by its name), it is never summed over the
expert-parallel ranks. So it was with shared adapters of experts in Megatron-Bridge (6009), and over tensor-parallel
ranks with the gate of Qwen2's shared expert in Pai-Megatron-Patch (397).
"""

import torch
import torch.distributed as dist
from common import WIDTH, LanguageModel, arguments, neighbours, sum_gradients, train
from cut_layers import ExpertBlock
from torch import nn


class Block(ExpertBlock):
    def __init__(self):
        super().__init__(expert)
        self.shared_expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return super().forward(x) + self.shared_expert(x)


def reduce():
    for name, parameter in model.named_parameters():
        is_expert = ".experts." in name if args.mended else "expert" in name
        sum_gradients([parameter], same_experts if is_expert else dist.group.WORLD, dist.get_world_size())


args = arguments(ep=1)
expert, same_experts = neighbours(args.ep)
torch.manual_seed(5)
model = LanguageModel(Block(), Block())
train(args, model, reduce=reduce)
