"""Experts on ranks with two all-to-alls by hand: a router, rows there, the experts, rows back.

The chapter *Experts* builds the same in its sections 1 and 2. Leads to :class:`pardemo.expert_parallel.ExpertParallel`,
which takes any experts, a shared one, other scores and a capacity, and averages what every rank has a copy of.

Every rank has tokens of its own and E/N of the E experts. Three tokens on each of two ranks, four experts, one for each
token::

    rank 0   tokens a b c   to experts 2 0 1     sorted  b c | a      rank 0 gets  b c e   for its experts 0 1 1
    rank 1   tokens d e f   to experts 3 1 2     sorted  e | f d      rank 1 gets  a f d   for its experts 2 2 3

Shapes: T tokens of a rank, h hidden, k experts of a token, R rows that arrive.
"""

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

Group = dist.ProcessGroup | None


class _Exchange(torch.autograd.Function):
    """Rows to the ranks, ``sends[0]`` of them to rank 0 and so on; backward, their gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.way = receives, sends, group
        arrived = rows.new_empty(sum(receives), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), receives, sends, group=group)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, *ctx.way), None, None, None


class PlainExperts(nn.Module):
    """A mixture of experts over the ranks of ``group``: [T, h] to [T, h], for tokens that are this rank's own.

    An expert's gradients are sums over all ranks' tokens. The router is a replica, and its gradient this rank's part:
    add the ranks' up, as :meth:`sum_router_gradient` does.

    Args:
        gate: the full router, from h to E, without a bias; the same on every rank.
        experts: all E of them, modules from [rows, h] to [rows, h]; each rank keeps E/N.
        top_k: how many of them a token goes to.
    """

    def __init__(self, gate: nn.Linear, experts: Sequence[nn.Module], top_k: int, group: Group = None):
        super().__init__()
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.top_k, local = group, top_k, len(experts) // self.ranks
        self.gate = copy.deepcopy(gate)
        self.experts = nn.ModuleList(map(copy.deepcopy, experts[self.rank * local : (self.rank + 1) * local]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local = len(self.experts)
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k)  # [T, k] both
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # [T·k]: the assignments, sorted by expert
        counts = chosen.flatten().bincount(minlength=local * self.ranks)  # [E]
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)  # first the counts: rows by rank, then by expert
        sends, receives = (n.view(self.ranks, local).sum(1).tolist() for n in (counts, coming))
        rows = _Exchange.apply(x[order // self.top_k], sends, receives, self.group)  # then the rows, [R, h]
        whose = torch.arange(local).repeat(self.ranks).repeat_interleave(coming)  # [R]: the expert of each
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            here = (whose == number).nonzero().squeeze(1)
            made = made.index_add(0, here, expert(rows[here]))
        back = _Exchange.apply(made, receives, sends, self.group)  # [T·k, h], in the order in which they left
        return torch.zeros_like(x).index_add(0, order // self.top_k, back * weights.flatten()[order, None])

    def sum_router_gradient(self) -> None:
        """After backward: the router's gradient over all ranks' tokens."""
        dist.all_reduce(self.gate.weight.grad, group=self.group)
