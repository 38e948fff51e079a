"""Tokens to the ranks that have their experts, sorted by expert, and the experts' outputs back to their tokens.

Three tokens, four experts on two ranks, one expert for each token::

    rank 0   tokens a b c   to experts 2 0 1     sorted  b c | a      rank 0 gets  b c e   for its experts 0 1 1
    rank 1   tokens d e f   to experts 3 1 2     sorted  e | f d      rank 1 gets  a f d   for its experts 2 2 3

Each rank sends the rows that go elsewhere once on their way there, and gets as many back; backward the same with their
gradients. Of T·k rows of h numbers, sent evenly, that is (N−1)/N·T·k·h a way.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pardemo.expert_parallel.exchange import all_to_all, tell
from pardemo.tensor_parallel.decorators import first_derivative_only, not_compiled
from pardemo.tensor_parallel.exchange import share


@dataclass(frozen=True)
class Plan:
    """How the rows of a rank travel.

    Attributes:
        order: [rows], by expert: which of the T·k assignments each row that leaves is. sends, receives: rows to and
            from each rank. place: [rows], of those that came, in the order of this rank's experts. counts: of each.
        dropped: assignments that found no room.
    """

    order: torch.Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    place: torch.Tensor
    counts: tuple[int, ...]
    dropped: int


def plan(
    experts: torch.Tensor, weights: torch.Tensor, count: int, group: dist.ProcessGroup, capacity: int | None = None
) -> Plan:
    """Where the rows go; all ranks of ``group`` call it.

    Args:
        experts, weights: of a :class:`~pardemo.expert_parallel.Routing`, [T, k].
        count: experts of all ranks. capacity: rows that a rank may send to an expert: those with the largest weights.

    Raises:
        RuntimeError: another rank has no routing.
        ValueError: the experts do not divide by the ranks.
    """
    ranks = dist.get_world_size(group)
    share(count, group, "a number of experts")
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)  # assignments by expert, in the tokens' order within each
    dropped = 0
    if capacity is not None:
        order, dropped = _with_room(order, flat, weights.detach().reshape(-1), count, capacity)
    counts = torch.bincount(flat[order], minlength=count)
    coming = tell(counts, group)  # [N, E/N]
    sends = counts.view(ranks, -1).sum(1).tolist()
    receives = coming.sum(1).tolist()
    here = torch.arange(coming.shape[1], device=flat.device).repeat(ranks)
    place = here.repeat_interleave(coming.reshape(-1)).argsort(stable=True)  # came by rank, then expert
    return Plan(order, tuple(sends), tuple(receives), place, tuple(coming.sum(0).tolist()), dropped)


def _with_room(
    order: torch.Tensor, flat: torch.Tensor, weights: torch.Tensor, count: int, capacity: int
) -> tuple[torch.Tensor, int]:
    """Of each expert's assignments the ``capacity`` ones with the largest weights, in the order of before."""
    best = weights.argsort(descending=True, stable=True)
    by_expert = best[flat[best].argsort(stable=True)]  # by expert, the largest first
    counts = torch.bincount(flat, minlength=count)
    begins = counts.cumsum(0) - counts
    rank_in_expert = torch.arange(len(flat), device=flat.device) - begins[flat[by_expert]]
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept[by_expert[rank_in_expert < capacity]] = True
    return order[kept[order]], int((~kept).sum())


@not_compiled
def dispatch(tokens: torch.Tensor, chosen: int, plan: Plan, group: dist.ProcessGroup) -> torch.Tensor:
    """[T, h] to the rows of this rank's experts [Σ counts, h], sorted by expert."""
    rows = tokens[plan.order // chosen]  # autograd adds the gradients of a token's k rows
    return _Exchange.apply(rows, plan.sends, plan.receives, group)[plan.place]


@not_compiled
def combine(outputs: torch.Tensor, weights: torch.Tensor, plan: Plan, group: dist.ProcessGroup) -> torch.Tensor:
    """The experts' rows [Σ counts, h] to the tokens' weighted sums [T, h]; of weights [T, k]."""
    back = torch.empty_like(plan.place)
    back[plan.place] = torch.arange(len(plan.place), device=back.device)
    rows = _Exchange.apply(outputs[back], plan.receives, plan.sends, group)
    tokens, chosen = weights.shape
    rows = rows * weights.reshape(-1)[plan.order].unsqueeze(-1).to(rows.dtype)
    return rows.new_zeros(tokens, rows.shape[-1]).index_add(0, plan.order // chosen, rows)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return all_to_all(rows, sends, receives, group)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        return all_to_all(gradient, ctx.receives, ctx.sends, ctx.group), None, None, None
