"""Rotary embedding of the plain order while the tokens are cut in zigzag: two chunks of each rank get wrong angles.

For an even load a context-parallel rank r gets chunks r and 2·cp − 1 − r of each sequence. The angles must be cut the
same way; cut in plain order, most queries and keys are turned by the angle of another place. Whether Megatron-LM cuts
its angles as its tokens was asked in Megatron-LM 560; in ms-swift 10071 one side used the zigzag order and the other
the contiguous one, and everything ran.
"""

import common
import torch
from torch import nn


class Rotary(nn.Module):
    """Turns pairs of each query's and key's numbers by an angle that grows with the position."""

    def __init__(self, positions):
        super().__init__()
        half = common.WIDTH // common.HEADS // 2
        angles = positions[:, None] * 100.0 ** -(torch.arange(half) / half)
        self.cos, self.sin = angles.cos()[:, None, None], angles.sin()[:, None, None]  # [s/cp, 1, 1, d/2]

    def forward(self, qk):  # [b, s/cp, 2, heads, d]
        a, b = qk.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1)


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args, self.positions = args, zigzag(args, torch.arange(common.LENGTH))
        plain = common.part(args, torch.arange(common.LENGTH))
        rotary = Rotary(self.positions if args.mended else plain)
        self.token = nn.Embedding(common.VOCABULARY, common.WIDTH)
        self.blocks = nn.ModuleList(common.Block(args.cp_group, rotary) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(common.WIDTH), nn.Linear(common.WIDTH, common.VOCABULARY)

    def forward(self, tokens):  # [b, s/cp]
        x = self.token(tokens)
        allowed = common.causal(self.args, self.positions)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def zigzag(args, x):
    """This rank's part of ``x``: the r-th chunk of 2·cp from the front and the r-th from the back."""
    chunks = x.chunk(2 * args.cp, dim=-1)
    return torch.cat([chunks[args.cp_rank], chunks[-1 - args.cp_rank]], dim=-1)


if __name__ == "__main__":
    args = common.arguments()
    common.train(args, Model, cut=lambda whole: (zigzag(args, whole[:, :-1]), zigzag(args, whole[:, 1:])))
