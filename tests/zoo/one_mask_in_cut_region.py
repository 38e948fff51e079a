"""Dropout inside attention drops the same places on each tensor-parallel rank, so that heads lose the same positions.

Tensor-parallel ranks have to agree on dropout of what is whole on each of them, so they get one seed. The same
generator then draws for the heads that each rank has for itself, and head 2 loses what head 0 loses. The Megatron
paper gives the cut regions a generator of their own (arXiv 1909.08053, appendix B.2); tt-train seeds one for all
(tt-metal 55947).
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import WIDTH, LanguageModel, arguments, neighbours, train
from cut_layers import ColumnLinear, RandomState, RowLinear
from torch import nn

HEADS = 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (ColumnLinear(WIDTH, WIDTH, tensor, bias=False) for _ in range(3))
        self.attention_dropout, self.out = nn.Dropout(0.2), RowLinear(WIDTH, WIDTH, tensor)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)  # [b, heads of this rank, s, s]
        with cut_region():
            weights = self.attention_dropout(weights)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.dropout = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.attention(self.norm(x)))


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
cut_region = RandomState(1000 + dist.get_rank()) if args.mended else nullcontext
torch.manual_seed(0)
model = LanguageModel(Block(), Block())
torch.manual_seed(100 + dist.get_rank(data))  # one seed for the ranks of a tensor-parallel group
train(args, model, group=data)
