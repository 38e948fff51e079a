"""The router's gradient is a part of a sum and taken for the whole, where experts get the tokens split over the ranks.

Every rank routes all tokens, and each sends its own part of them through the experts; so what comes back to the
router on a rank is of that part. torchtitan took it for the whole (2387, 2388, 2416): routers of tensor-parallel
ranks were different after the first step. "I can't think of a worse class of bugs for MoEs", the report says.
"""

import torch
from common import WIDTH, LanguageModel, arguments, average_gradients, neighbours, sum_gradients, train
from cut_layers import Experts, choose, join, own_part, split
from torch import nn


class Mixture(nn.Module):
    """A router and experts that all ranks have; a rank computes them for its part of the sequence."""

    def __init__(self):
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False), Experts(4)

    def forward(self, x):
        hidden = self.norm(x)
        part = split if args.mended else own_part  # the first lets the gradients of a part go back
        weights = part(choose(self.router(hidden).softmax(-1)), tensor, dim=1)  # [b, s/t, e]
        return x + join(self.experts(split(hidden, tensor), weights), tensor)


def reduce():
    for mixture in model.blocks:
        sum_gradients(mixture.experts.parameters(), tensor)
    average_gradients(model.parameters(), data)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(4)
model = LanguageModel(Mixture(), Mixture())
train(args, model, group=data, reduce=reduce)
