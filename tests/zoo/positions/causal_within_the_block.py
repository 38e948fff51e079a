"""Ring attention whose causal mask covers a rank's own block only: its queries see the keys of later ranks.

Blocks of keys and values go round a ring. A block of an earlier rank is seen in full, the rank's own block below the
diagonal, and a later one not at all; leave out the last rule and tokens see their own future. The loss falls even
faster than it should. How the mask is to be cut for each
block is asked in ring-flash-attention 54; context parallelism that drops the mask it was given: Accelerate 4177.
"""

import common
import torch
import torch.distributed as dist
from torch import nn


class Passed(torch.autograd.Function):
    """Sends a tensor to the next rank of the ring and returns the previous rank's; gradients go the other way."""

    @staticmethod
    def forward(ctx, x, group, step=1):
        ctx.group, ctx.step = group, step
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
        received, x = torch.empty_like(x).contiguous(), x.contiguous()
        sending = dist.isend(x, ranks[(me + step) % len(ranks)], group=group)
        dist.recv(received, ranks[(me - step) % len(ranks)], group=group)
        sending.wait()
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Passed.apply(gradient, ctx.group, -ctx.step), None, None


class Ring(nn.Module):
    """Attention over blocks of keys and values that come round, [b, s/cp, heads, d] each."""

    def __init__(self, args):
        super().__init__()
        self.args = args

    def forward(self, q, k, v, _):
        q, kv = q.transpose(1, 2), torch.stack([k, v]).transpose(2, 3)  # [b, heads, s/cp, d]
        scores, values = [], []
        for hop in range(self.args.cp):
            source = (self.args.cp_rank - hop) % self.args.cp
            score = q @ kv[0].transpose(-1, -2) / q.shape[-1] ** 0.5
            seen = torch.ones_like(score, dtype=torch.bool)
            if source == self.args.cp_rank:
                seen = seen.tril()
            elif source > self.args.cp_rank and self.args.mended:
                seen = ~seen
            scores.append(score.masked_fill(~seen, -torch.inf))
            values.append(kv[1])
            if hop + 1 < self.args.cp:
                kv = Passed.apply(kv, self.args.cp_group)
        return (torch.cat(scores, dim=-1).softmax(-1) @ torch.cat(values, dim=-2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.qkv, self.ring = nn.Linear(common.WIDTH, 3 * common.WIDTH), Ring(args)
        self.out = nn.Linear(common.WIDTH, common.WIDTH)

    def forward(self, x, allowed):
        q, k, v = self.qkv(x).unflatten(-1, (3, common.HEADS, -1)).unbind(2)
        return self.out(self.ring(q, k, v, allowed).flatten(2))


class Model(common.Model):
    def __init__(self, args):
        super().__init__(args)
        for block in self.blocks:
            block.attention = Attention(args)

    def allowed(self, tokens, positions):
        """The ring knows."""


if __name__ == "__main__":
    common.train(common.arguments(), Model)
