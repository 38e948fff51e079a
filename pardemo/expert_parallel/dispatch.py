"""Tokens to the ranks that have their experts, sorted by expert, and the experts' outputs back to their tokens.

Three tokens, four experts on two ranks, one expert for each token::

    rank 0   tokens a b c   to experts 2 0 1     sorted  b c | a      rank 0 gets  b c e   for its experts 0 1 1
    rank 1   tokens d e f   to experts 3 1 2     sorted  e | f d      rank 1 gets  a f d   for its experts 2 2 3

Each rank sends the rows that go elsewhere once on their way there, and gets as many back; backward the same with their
gradients. Of T·k rows of h numbers, sent evenly, that is (N−1)/N·T·k·h a way. How many go where is not known before the
router has chosen: ranks tell each other first (E whole numbers).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pardemo.collectives.decorators import first_derivative_only, not_compiled
from pardemo.groups import divide


@dataclass(frozen=True)
class RoutingPlan:
    """The exchange of a rank's rows: their order, and how many go to and come from each rank.

    Attributes:
        order: [rows], by expert: which of the T·k assignments each row that leaves is. sends: rows to each rank.
        coming: rows from each rank to each of this rank's experts.
        dropped: assignments over an expert's capacity.
    """

    order: torch.Tensor
    sends: tuple[int, ...]
    coming: tuple[tuple[int, ...], ...]
    dropped: int

    @property
    def receives(self) -> tuple[int, ...]:
        """Rows from each rank."""
        return tuple(map(sum, self.coming))

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows to each of this rank's experts."""
        return tuple(map(sum, zip(*self.coming, strict=True)))


def plan(
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    capacity: int | None = None,
) -> RoutingPlan:
    """Plans where each row goes; all ranks of ``group`` call it.

    Args:
        experts, weights: of a :class:`~pardemo.expert_parallel.Routing`, [T, k].
        num_experts: of all ranks. capacity: rows that a rank may send to an expert: those with the largest weights.

    Raises:
        ValueError: the experts do not divide by the ranks.
    """
    divide(num_experts, group, "a number of experts")
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)  # assignments by expert, in the tokens' order within each
    if capacity is not None:
        best = weights.detach().reshape(-1).argsort(descending=True, stable=True)
        by_expert = best[flat[best].argsort(stable=True)]  # by expert, the largest first
        counts = torch.bincount(flat, minlength=num_experts)
        first = counts.cumsum(0) - counts
        position = torch.arange(len(flat), device=flat.device) - first[flat[by_expert]]
        has_room = torch.zeros_like(flat, dtype=torch.bool)
        has_room[by_expert[position < capacity]] = True
        order = order[has_room[order]]
    counts = torch.bincount(flat[order], minlength=num_experts)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=group)
    sends, arriving = (tensor.view(group.size(), -1) for tensor in (counts, coming))  # [N, E/N]
    sent, received = tuple(sends.sum(1).tolist()), tuple(map(tuple, arriving.tolist()))
    return RoutingPlan(order, sent, received, len(flat) - len(order))


@not_compiled
def dispatch(tokens: torch.Tensor, top_k: int, plan: RoutingPlan, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """[T, h] to the rows of each of this rank's experts [its count, h]."""
    rows = tokens.index_select(0, plan.order // top_k)  # autograd adds the gradients of a token's k rows
    came = _Exchange.apply(rows, plan.sends, plan.receives, group)  # by rank, then expert
    pieces = came.split([count for of_rank in plan.coming for count in of_rank])
    local = len(plan.coming[0])
    return [torch.cat(pieces[expert::local]) for expert in range(local)]


@not_compiled
def combine(
    outputs: Sequence[torch.Tensor], weights: torch.Tensor, plan: RoutingPlan, group: dist.ProcessGroup
) -> torch.Tensor:
    """The rows of each of this rank's experts to the tokens' weighted sums [T, h]; of weights [T, k]."""
    pieces = [made.split(of_ranks) for made, of_ranks in zip(outputs, zip(*plan.coming, strict=True), strict=True)]
    going = torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])  # by rank, then expert
    rows = _Exchange.apply(going, plan.receives, plan.sends, group)
    weights_of_rows = weights.reshape(-1)[plan.order].to(rows.dtype)
    return _Add.apply(rows, weights_of_rows, plan.order // weights.shape[1], len(weights))


class _Exchange(torch.autograd.Function):
    """Rows [Σ sends, ..], the first ``sends[0]`` of them to rank 0 and so on; what came [Σ receives, ..]."""

    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.way = receives, sends, group
        came = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(came, rows.contiguous(), list(receives), list(sends), group=group)
        return came

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, *ctx.way), None, None, None


class _Add(torch.autograd.Function):
    """Σ wᵣ·rᵣ over the rows [R, h] of each of T tokens. Written out, since autograd would pass three times over R·h."""

    @staticmethod
    def forward(ctx, rows, weights, token, tokens):
        ctx.save_for_backward(rows, weights, token)
        return rows.new_zeros(tokens, rows.shape[-1]).index_add_(0, token, rows * weights.unsqueeze(-1))

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        rows, weights, token = ctx.saved_tensors
        of_rows = gradient.index_select(0, token)
        of_weights = torch.einsum("rh,rh->r", of_rows, rows)
        return of_rows.mul_(weights.unsqueeze(-1)), of_weights, None, None
