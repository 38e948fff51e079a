"""Dropout of the residual stream, which is whole on each tensor-parallel rank, drops other places on each of them.

Ranks were given a seed each, which is right inside a layer that is cut and right for data parallelism. Behind the
layer's sum all ranks of a tensor-parallel group have the same values, and have to drop the same ones: from there on
each computes with another stream, and what they add up in the next layer belongs to no model. slapo 21 states both
rules; the Megatron paper (arXiv 1909.08053, appendix B.2) seeds all ranks of a group alike for this dropout.
"""

import torch
import torch.distributed as dist
from common import WIDTH, LanguageModel, arguments, neighbours, train
from cut_layers import ColumnLinear, RandomState, RowLinear
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(WIDTH), ColumnLinear(WIDTH, 4 * WIDTH, tensor)
        self.fc2 = RowLinear(4 * WIDTH, WIDTH, tensor)
        self.hidden_dropout, self.residual_dropout = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x):
        hidden = F.gelu(self.fc1(self.norm(x)))
        with cut_region():
            hidden = self.hidden_dropout(hidden)
        return x + self.residual_dropout(self.fc2(hidden))


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
cut_region = RandomState(1000 + dist.get_rank())
torch.manual_seed(0)
model = LanguageModel(Block(), Block())
torch.manual_seed(100 + dist.get_rank(data if args.mended else None))
train(args, model, group=data)
