"""Ring attention whose causal mask covers a rank's own block only: its queries see the keys of later ranks.

Blocks of keys and values go round a ring. A block of an earlier rank is seen in full, the rank's own block below the
diagonal, and a later one not at all; leave out the last rule and tokens see their own future. The loss falls even
faster than it should. How the mask is to be cut for each
block is asked in ring-flash-attention 54; context parallelism that drops the mask it was given: Accelerate 4177.
"""

import torch
import torch.distributed as dist
from common import WIDTH, arguments, neighbours
from sequences import HEADS, Model, train_cut
from torch import nn


class Passed(torch.autograd.Function):
    """Sends a tensor to the next rank of the ring and returns the previous rank's; gradients go the other way."""

    @staticmethod
    def forward(ctx, x, step=1):
        ctx.step, ranks, me = step, dist.get_process_group_ranks(sequence), dist.get_rank(sequence)
        received, x = torch.empty_like(x).contiguous(), x.contiguous()
        sending = dist.isend(x, ranks[(me + step) % len(ranks)], group=sequence)
        dist.recv(received, ranks[(me - step) % len(ranks)], group=sequence)
        sending.wait()
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Passed.apply(gradient, -ctx.step), None


class Ring(nn.Module):
    """Attention over blocks of keys and values that come round, [b, s/cp, heads, d] each."""

    def forward(self, q, k, v):
        q, kv, me = q.transpose(1, 2), torch.stack([k, v]).transpose(2, 3), dist.get_rank(sequence)
        scores, values = [], []
        for hop in range(args.cp):
            source = (me - hop) % args.cp
            score = q @ kv[0].transpose(-1, -2) / q.shape[-1] ** 0.5
            seen = torch.ones_like(score, dtype=torch.bool)
            if source == me:
                seen = seen.tril()
            elif source > me and args.mended:
                seen = ~seen
            scores.append(score.masked_fill(~seen, -torch.inf))
            values.append(kv[1])
            if hop + 1 < args.cp:
                kv = Passed.apply(kv)
        return (torch.cat(scores, dim=-1).softmax(-1) @ torch.cat(values, dim=-2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.ring, self.out = nn.Linear(WIDTH, 3 * WIDTH), Ring(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, _):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self.out(self.ring(q, k, v).flatten(2))


args = arguments(cp=1)
sequence, data = neighbours(args.cp)
torch.manual_seed(0)
model = Model(sequence)
for block in model.blocks:
    block.attention = Attention()
train_cut(args, model, data)
