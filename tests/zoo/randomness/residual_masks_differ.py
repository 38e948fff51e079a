"""Dropout of the residual stream, which is whole on each tensor-parallel rank, drops other places on each of them.

Ranks were given a seed each, which is right inside a layer that is cut and right for data parallelism. Behind the
layer's sum all ranks of a tensor-parallel group have the same values, and have to drop the same ones: from there on
each computes with another stream, and what they add up in the next layer belongs to no model. slapo 21 states both
rules; the Megatron paper (arXiv 1909.08053, appendix B.2) seeds all ranks of a group alike for this dropout.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import WIDTH, ColumnLinear, RandomState, RowLinear, arguments, train
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), ColumnLinear(WIDTH, 64), RowLinear(64, WIDTH)
        self.hidden_dropout, self.residual_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.cut_region = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.fc1(self.norm(x)))
        with self.cut_region():
            hidden = self.hidden_dropout(hidden)
        return x + self.residual_dropout(self.fc2(hidden))


if __name__ == "__main__":
    args, mesh = arguments()
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("first", Block())
    model.add_module("second", Block())
    random_state = RandomState(1000 + dist.get_rank())
    for block in model:
        block.fc1.cut(mesh.get_group("tp"))
        block.fc2.cut(mesh.get_group("tp"))
        block.cut_region = random_state
    torch.manual_seed(100 + (mesh.get_local_rank("dp") if args.mended else dist.get_rank()))
    train(args, model, mesh.get_group("dp"), lr=0.01)
