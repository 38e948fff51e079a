"""Ulysses: an all-to-all gives each rank some heads of the whole sequence (Jacobs et al. 2023, arXiv 2309.14509).

Attention itself is then any function that one process would call; a second all-to-all brings its output back to where
the tokens are. Of queries, keys, values and outputs, E elements on a rank altogether, a rank sends (N−1)/N · E forward
and as much backward: less than a ring the more ranks there are, and never more ranks than heads of keys.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.collectives.decorators import first_derivative_only, not_compiled
from pardemo.collectives.ring import agree
from pardemo.context_parallel.ring import check_shapes
from pardemo.groups import group_of

HEADS, TOKENS = 1, 2
#: query [b, h/N, S, d], key and value [b, h_kv/N, S, d] -> [b, h/N, S, d_v]
Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@not_compiled
def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    causal: bool = True,
    core: Core | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens to those of all ranks [b, h, S/N, d_v]; all ranks of ``group`` call it.

    Tokens lie in the plain order: rank r has the r-th of N pieces.

    Args:
        q: [b, h, S/N, d]. k: [b, h_kv, S/N, d], v: [b, h_kv, S/N, d_v], where h_kv divides h, and N divides both: with
            fewer key/value heads than ranks they are repeated before they are sent, as often as it takes.
        causal: no token sees a later one. core: what a rank computes of its heads; scaled_dot_product_attention, causal
            or not, when None.

    Raises:
        ValueError, TypeError: as :func:`~pardemo.context_parallel.ring_attention`; heads do not divide by the ranks.
    """
    group = group_of(group)
    check_shapes(q, k, v)
    ranks = dist.get_world_size(group)
    heads, groups = q.shape[1], k.shape[1]
    if heads % ranks:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(f"{heads} heads do not divide by the {ranks} ranks of the group; {fits} would do, or a ring")
    agree(k, f"Ulysses attention{', causal' * causal} of {tuple(q.shape)}, {tuple(v.shape)}", group)
    if groups % ranks:  # each rank needs the keys of its own queries' heads: repeated at most once per query's
        times = next(n for n in range(1, heads // groups + 1) if groups * n % ranks == 0 == heads % (groups * n))
        k, v = (tensor.repeat_interleave(times, HEADS) for tensor in (k, v))
    q, k, v = (_AllToAll.apply(tensor, HEADS, TOKENS, group) for tensor in (q, k, v))
    if core is not None:
        out = core(q, k, v)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return _AllToAll.apply(out, TOKENS, HEADS, group)


class _AllToAll(torch.autograd.Function):
    """Cut along one dimension, a part for each rank, and joined along another; its mirror image backward::

    sequence to heads    rank 0  tokens 0, heads A B         tokens 0 1, heads A
                         rank 1  tokens 1, heads A B   ->    tokens 0 1, heads B
    """

    @staticmethod
    def forward(ctx, tensor, cut, join, group):
        ctx.back = join, cut, group
        parts = torch.stack(tensor.chunk(dist.get_world_size(group), cut))  # [N, ..]: a part for each rank
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        return _AllToAll.apply(gradient, *ctx.back), None, None, None
