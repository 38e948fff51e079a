"""Rotary embedding of the plain order while the tokens are cut in zigzag: two chunks of each rank get wrong angles.

For an even load a context-parallel rank r gets chunks r and 2·cp − 1 − r of each sequence. The angles must be cut the
same way; cut in plain order, most queries and keys are turned by the angle of another place. Whether Megatron-LM cuts
its angles as its tokens was asked in Megatron-LM 560; in ms-swift 10071 one side used the zigzag order and the other
the contiguous one, and everything ran.
"""

import torch
import torch.distributed as dist
from common import LENGTH, WIDTH, arguments, neighbours
from cut_layers import own_part
from sequences import HEADS, Model, train_cut
from torch import nn


class Rotary(nn.Module):
    """Turns pairs of each query's and key's numbers by an angle that grows with the position."""

    def __init__(self, positions):
        super().__init__()
        half = WIDTH // HEADS // 2
        angles = positions[:, None] * 100.0 ** -(torch.arange(half) / half)
        self.cos, self.sin = angles.cos()[:, None, None], angles.sin()[:, None, None]  # [s/cp, 1, 1, d/2]

    def forward(self, qk):  # [b, s/cp, 2, heads, d]
        a, b = qk.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1)


def zigzag(x, group, dim):
    """This rank's part of ``x``: the r-th chunk of 2·cp from the front and the r-th from the back."""
    chunks, rank = x.chunk(2 * args.cp, dim), dist.get_rank(group)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


args = arguments(cp=1)
sequence, data = neighbours(args.cp)
torch.manual_seed(0)
positions = (zigzag if args.mended else own_part)(torch.arange(LENGTH), sequence, 0)
train_cut(args, Model(sequence, zigzag, Rotary(positions)), data, part=zigzag)
