"""Builds Megatron's cuts from f and g alone, as the chapters on Megatron's MLP and attention do.

(*Megatron's MLP*, sections 1 to 3: columns, rows, and both; *Megatron's attention*, sections 2, 3 and 5: heads, a fused
projection, a block; *The vocabulary*, section 1: embedding and loss.) Leads to :mod:`pardemo.tensor_parallel`, whose
:class:`~pardemo.tensor_parallel.ColumnParallelLinear` and others exchange while the weight's gradient is computed, cut
the sequence too, share key/value heads, and compare the ranks' full layers.

Every rank has the same X, computes with its part of each weight, and the parts are added once, at the end. Two ranks,
W1 cut by columns and W2 by rows, so that GeLU needs nothing from the other rank::

                 +--> X W1[0] --> GeLU --> Y[0] W2[0] --+
    X --> f -----|                rank 0                |--> g --> Z = Y[0] W2[0] + Y[1] W2[1], on both
                 +--> X W1[1] --> GeLU --> Y[1] W2[1] --+
                                  rank 1
          forward: nothing                               forward: all-reduce
          backward: all-reduce                           backward: nothing

Shapes: b batch, s sequence, h hidden, t ranks, V vocabulary. Every class takes the full layer, the same on all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

Group = dist.ProcessGroup | None


class _F(torch.autograd.Function):
    """f: nothing forward; backward, the ranks' gradients of the same input are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _G(torch.autograd.Function):
    """g: the ranks' parts are summed; backward, every rank's part has the gradient of the sum."""

    @staticmethod
    def forward(ctx, part, group):
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def f(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The way into the parts of a layer: all ranks have ``x``."""
    return _F.apply(x, group)


def g(part: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The way out of them: the sum of the ranks' parts, on all ranks."""
    return _G.apply(part, group)


def part_of(full: torch.Tensor, dim: int, group: Group = None, sections: int = 1) -> nn.Parameter:
    """This rank's part of a weight along ``dim``; of a fused one (``sections``), its part of each section.

    query, key and value of four heads, fused, on rank 1 of 2: ``[q0 q1 Q2 Q3 | k0 k1 K2 K3 | v0 v1 V2 V3]``
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parts = [section.chunk(ranks, dim)[rank] for section in full.detach().chunk(sections, dim)]
    return nn.Parameter(torch.cat(parts, dim))


class ColumnLinear(nn.Module):
    """This rank's outputs of a linear layer: [.., in] to [.., out/t]. Sends nothing forward."""

    def __init__(self, full: nn.Linear, group: Group = None, sections: int = 1):
        super().__init__()
        self.group = group
        self.weight = part_of(full.weight, 0, group, sections)  # [out/t, in]
        self.bias = part_of(full.bias, 0, group, sections)  # [out/t]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(f(x, self.group), self.weight, self.bias)  # [b, s, out/t]


class RowLinear(nn.Module):
    """A linear layer over this rank's inputs: [.., in/t] to [.., out], the bias added once, after the sum."""

    def __init__(self, full: nn.Linear, group: Group = None):
        super().__init__()
        self.group = group
        self.weight = part_of(full.weight, 1, group)  # [out, in/t]
        self.bias = nn.Parameter(full.bias.detach().clone())  # [out], whole on every rank

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return g(F.linear(y, self.weight), self.group) + self.bias  # [b, s, out]


class MLP(nn.Module):
    """GeLU(X W1) W2, W1 by columns and W2 by rows: [b, s, h] to [b, s, h]; one all-reduce forward, one backward."""

    def __init__(self, first: nn.Linear, second: nn.Linear, group: Group = None):
        super().__init__()
        self.first, self.second = ColumnLinear(first, group), RowLinear(second, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x)))  # inside: [b, s, inner/t]


class Attention(nn.Module):
    """Causal self-attention with heads/t of the heads on each rank; ``qkv`` is fused: all of query, key, value."""

    def __init__(self, qkv: nn.Linear, out: nn.Linear, heads: int, group: Group = None):
        super().__init__()
        self.heads = heads // dist.get_world_size(group)
        self.qkv, self.out = ColumnLinear(qkv, group, sections=3), RowLinear(out, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)  # three of [b, s, h/t]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # [b, heads/t, s, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, heads/t, s, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, h/t] to [b, s, h]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Every rank has whole norms: they see the same x and step alike."""

    def __init__(self, norm_1: nn.Module, attention: Attention, norm_2: nn.Module, mlp: MLP):
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.mlp = norm_1, attention, norm_2, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))  # [b, s, h]
        return x + self.mlp(self.norm_2(x))  # [b, s, h]


class Embedding(nn.Module):
    """Rows rank·V/t … of the table: each rank looks up what it has, zero elsewhere; the sum is complete."""

    def __init__(self, full: nn.Embedding, group: Group = None):
        super().__init__()
        self.group = group
        self.weight = part_of(full.weight, 0, group)  # [V/t, h]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local, elsewhere = _own(tokens, len(self.weight), self.group)  # [b, s]
        rows = F.embedding(local, self.weight).masked_fill(elsewhere[..., None], 0)  # [b, s, h]
        return g(rows, self.group)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The mean loss from logits [b, s, V/t] that no rank has whole, and targets [b, s]: three numbers a token travel.

    log Σexp(z) − z_target: the sum of the ranks' sums, and the target's logit from the one rank that has it.
    """
    peak = logits.detach().amax(-1)  # [b, s]
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    shifted = logits - peak[..., None]  # [b, s, V/t]
    local, elsewhere = _own(targets, logits.shape[-1], group)
    target = shifted.gather(-1, local[..., None])[..., 0].masked_fill(elsewhere, 0)  # [b, s]
    total, target = g(torch.stack([shifted.exp().sum(-1), target]), group)  # [2, b, s] in one message
    return (total.log() - target).mean()


def _own(numbers: torch.Tensor, here: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the vocabulary as rows of this rank's part, and which of them are on another rank (row 0 for them)."""
    local = numbers - dist.get_rank(group) * here
    elsewhere = (local < 0) | (local >= here)
    return local.masked_fill(elsewhere, 0), elsewhere
