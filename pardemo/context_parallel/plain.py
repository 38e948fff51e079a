"""Causal attention over a sequence that the ranks share, by a ring and by Ulysses, with send and receive by hand.

The chapter *Long sequences* builds the same in its sections 2, 3 and 5. Leads to
:func:`pardemo.context_parallel.ring_attention` and :func:`pardemo.context_parallel.ulysses_attention`, which send while
they compute, balance the ranks' work (the zigzag), keep no scores, and know grouped queries and packed documents.

Rank r has the r-th of N pieces of the sequence. In the ring its queries stay, and keys and values go round; after step
s it has those of rank r − s, which it sees whole, or not at all where they come later::

    step      0           1           2
    rank 0    k0 (own)    k2 -        k1 -
    rank 1    k1 (own)    k0 seen     k2 -
    rank 2    k2 (own)    k1 seen     k0 seen

Shapes: queries, keys, values [b, heads, S/N, d]; the logarithm of each softmax's sum [b, heads, S/N, 1].
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

Group = dist.ProcessGroup | None


def _scores(q: torch.Tensor, k: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """[b, heads, queries, keys]; among a rank's own tokens none sees a later one."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if diagonal else scores


def _pass_on(tensors: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """To the next rank; returns those of the rank before."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    leaving, coming = [tensor.contiguous() for tensor in tensors], [torch.empty_like(tensor) for tensor in tensors]
    messages = [dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % ranks) for tensor in leaving]
    messages += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=(rank - 1) % ranks) for tensor in coming]
    for message in dist.batch_isend_irecv(messages) if ranks > 1 else ():
        message.wait()
    return coming if ranks > 1 else tensors


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group):
        rank, ranks, ctx.group = dist.get_rank(group), dist.get_world_size(group), group
        home = k, v
        out, log_sum = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)  # nothing seen yet
        for step in range(ranks):
            if step <= rank:  # the keys of rank - step
                scores = _scores(q, k, diagonal=step == 0)
                block = scores.logsumexp(-1, keepdim=True)
                both = torch.logaddexp(log_sum, block)
                out = out * (log_sum - both).exp() + (scores - both).exp() @ v
                log_sum = both
            if step < ranks - 1:
                k, v = _pass_on([k, v], group)
        ctx.save_for_backward(q, *home, out, log_sum)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, log_sum = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        of_q, of_k, of_v = (torch.zeros_like(tensor) for tensor in (q, k, v))
        towards = (gradient * out).sum(-1, keepdim=True)  # what softmax takes off each score's gradient
        for step in range(ranks):
            if step <= rank:
                weights = (_scores(q, k, diagonal=step == 0) - log_sum).exp()
                of_scores = weights * (gradient @ v.mT - towards) / q.shape[-1] ** 0.5
                of_q = of_q + of_scores @ k
                of_k = of_k + of_scores.mT @ q
                of_v = of_v + weights.mT @ gradient
            k, v, of_k, of_v = _pass_on([k, v, of_k, of_v], ctx.group)  # gradients travel with what they are of
        return of_q, of_k, of_v, None


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group = None) -> torch.Tensor:
    """This rank's part of causal attention over the whole sequence."""
    return _Ring.apply(q, k, v, group)


class _Swap(torch.autograd.Function):
    """Cut along one dimension, a part for each rank, and joined along another; its mirror image backward."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.back = join, cut, group
        parts = torch.stack(x.chunk(dist.get_world_size(group), cut))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, gradient):
        return _Swap.apply(gradient, *ctx.back), None, None, None


def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The same with some heads of the whole sequence on each rank in between; N divides the heads."""
    q, k, v = (_Swap.apply(tensor, 1, 2, group) for tensor in (q, k, v))  # [b, heads/N, S, d]
    return _Swap.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1, group)
