"""Dropout inside attention drops the same places on each tensor-parallel rank, so that heads lose the same positions.

Tensor-parallel ranks have to agree on dropout of what is whole on each of them, so they get one seed. The same
generator then draws for the heads that each rank has for itself, and head 2 loses what head 0 loses. The Megatron
paper gives the cut regions a generator of their own (arXiv 1909.08053, appendix B.2); tt-train seeds one for all
(tt-metal 55947).
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import WIDTH, ColumnLinear, RandomState, RowLinear, arguments, train
from torch import nn

HEADS, LENGTH = 4, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (ColumnLinear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.attention_dropout, self.out = nn.Dropout(0.2), RowLinear(WIDTH, WIDTH)
        self.cut_region = nullcontext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)  # [b, heads of this rank, s, s]
        with self.cut_region():
            weights = self.attention_dropout(weights)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.dropout = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.attention(self.norm(x)))


if __name__ == "__main__":
    args, mesh = arguments()
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("first", Block())
    model.add_module("second", Block())
    random_state = RandomState(1000 + dist.get_rank())
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            module.cut(mesh.get_group("tp"))
        if isinstance(module, Attention) and args.mended:
            module.cut_region = random_state
    torch.manual_seed(100 + mesh.get_local_rank("dp"))  # one seed for the ranks of a tensor-parallel group
    train(args, model, mesh.get_group("dp"), 0.02, lambda x: x.mean(1, keepdim=True) - x, (LENGTH, WIDTH))
