"""Ring attention: queries stay where they are, keys and values go round (Liu et al. 2023, arXiv 2310.01889).

Each rank has S/N tokens. It computes its queries' attention to its own keys and values, while these travel to the next
rank; then to those that have come, and so on: N blocks, merged as they come (:mod:`~pardemo.context_parallel.blocks`).
Backward they go round again, and the gradients of keys and values behind them, which end where these came from.

A rank sends, of K and V together with E elements on a rank, (N−1)·E forward; backward as many again, and (N−1)·E of
gradients, in fp32 where K and V have fewer bits. It keeps its own queries, keys, values and outputs, and the logarithm
of each softmax's sum: nothing that grows with S² or with N.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from pardemo.collectives.decorators import first_derivative_only, not_compiled
from pardemo.collectives.ring import agree
from pardemo.context_parallel.blocks import attend, attend_backward, merge
from pardemo.context_parallel.order import pieces_of
from pardemo.groups import group_of

ALL = slice(None)


@not_compiled
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    causal: bool = True,
    order: str = "zigzag",
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens to those of all ranks [b, h, S/N, d_v]; all ranks of ``group`` call it.

    Args:
        q: [b, h, S/N, d]. k: [b, h_kv, S/N, d], where h_kv divides h. v: [b, h_kv, S/N, d_v].
        causal: no token sees a later one, of the whole sequence. order: which tokens a rank has, ``zigzag`` or
            ``plain`` (:mod:`~pardemo.context_parallel.order`); it matters only where attention is causal.
        documents: [b, S/N], whole numbers: a token sees those of its own document alone (packed samples).

    Raises:
        ValueError: shapes that do not fit each other or the order, or differ between ranks; names both.
        TypeError: no floating-point numbers, or of several dtypes.
    """
    group = group_of(group)
    check_shapes(q, k, v, documents)
    pieces = len(pieces_of(0, 1, order))
    if causal and q.shape[2] % pieces:
        raise ValueError(f"{q.shape[2]} tokens of a rank do not divide into the two pieces of the zigzag order")
    words = f"ring attention ({order}{', causal' * causal}{', documents' * (documents is not None)})"
    agree(k, f"{words} of {tuple(q.shape)}, {tuple(v.shape)}", group)
    return _RingAttention.apply(q, k, v, documents, group, causal, order)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, documents, group, causal, order):
        ctx.group, ctx.causal, ctx.order = group, causal, order
        rank = dist.get_rank(group)
        for source, travelling in _round(k, v, documents, group):
            if source == rank:
                out, log_sum = attend(q, k, v, causal, _mask(documents, documents))  # pieces: in the sequence's order
            elif seen := _seen(rank, source, causal, order, q.shape[2]):
                ours, theirs = seen
                keys, values, mask = _block(travelling, theirs, documents, ours)
                more = attend(q[:, :, ours], keys, values, mask=mask)
                out[:, :, ours], log_sum[:, :, ours] = merge(out[:, :, ours], log_sum[:, :, ours], *more)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, out, log_sum)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        q, k, v, documents, out, log_sum = ctx.saved_tensors
        group, rank, gradient = ctx.group, dist.get_rank(ctx.group), gradient.to(q.dtype)
        behind = None  # gradients of what travels, one step late
        for source, travelling in _round(k, v, documents, group):
            if source == rank:
                mask = _mask(documents, documents)
                of_q, *of_own = attend_backward(gradient, q, k, v, out, log_sum, ctx.causal, mask)
                continue
            sums = [torch.zeros_like(tensor, dtype=log_sum.dtype) for tensor in travelling[:2]]
            if seen := _seen(rank, source, ctx.causal, ctx.order, q.shape[2]):
                ours, theirs = seen
                keys, values, mask = _block(travelling, theirs, documents, ours)
                here = [tensor[:, :, ours].contiguous() for tensor in (gradient, q, out, log_sum)]
                gradients = attend_backward(*here[:2], keys.contiguous(), values.contiguous(), *here[2:], mask=mask)
                of_q[:, :, ours] += gradients[0]
                for of_all, of_these in zip(sums, gradients[1:], strict=True):
                    of_all[:, :, theirs] = of_these
            if behind:
                for of_all, earlier in zip(sums, behind(), strict=True):
                    of_all += earlier
            behind = _pass_on(sums, group)
        if behind:  # the last rank that they passed sends them home
            for of_all, others in zip(of_own, behind(), strict=True):
                of_all += others
        return of_q.to(q.dtype), of_own[0].to(k.dtype), of_own[1].to(v.dtype), None, None, None, None


def _round(
    k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, group: dist.ProcessGroup
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """This rank, and what travels from it; then each other one's that comes, while it goes on to the next rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    travelling = [k, v] if documents is None else [k, v, documents]
    for step in range(ranks):
        wait = _pass_on(travelling, group) if step < ranks - 1 else None
        yield (rank - step) % ranks, travelling
        if wait:
            travelling = wait()


def _pass_on(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Callable[[], list[torch.Tensor]]:
    """Starts sending ``tensors`` to the next rank; what is returned waits for those of the one before.

    They are of the same shapes and dtypes on all ranks, and must not change before it has returned.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    leaving = [tensor.contiguous() for tensor in tensors]
    coming = [torch.empty_like(tensor) for tensor in leaving]
    there, here = (rank + 1) % ranks, (rank - 1) % ranks
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, group=group, group_peer=there) for tensor in leaving]
        + [dist.P2POp(dist.irecv, tensor, group=group, group_peer=here) for tensor in coming]
    )

    def wait() -> list[torch.Tensor]:
        for work in works:
            work.wait()
        leaving.clear()
        return coming

    return wait


def _mask(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> torch.Tensor | None:
    """[b, s, t]: whose documents are the same."""
    return None if ours is None or theirs is None else ours[:, :, None] == theirs[:, None]


def _block(
    travelling: list[torch.Tensor], theirs: slice, documents: torch.Tensor | None, ours: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Those of the keys and values that have come which are seen, and which of our queries sees which."""
    keys, values, *names = travelling
    mask = _mask(documents[:, ours], names[0][:, theirs]) if documents is not None else None
    return keys[:, :, theirs], values[:, :, theirs], mask


def _seen(rank: int, source: int, causal: bool, order: str, tokens: int) -> tuple[slice, slice] | None:
    """Of the block of another rank's keys: the queries that see any of them, and the keys that these see, all of them;
    None where no query sees one."""
    if not causal:
        return ALL, ALL
    if order == "plain":
        return (ALL, ALL) if source < rank else None
    half = tokens // 2
    return (ALL, slice(half)) if source < rank else (slice(half, None), ALL)


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None = None) -> None:
    """Raises ValueError or TypeError where the three do not fit each other."""
    shapes = f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)}"
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"queries, keys and values have one floating-point dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{shapes} do not fit: they are [batch, heads, tokens, width], of the same batch and tokens, keys as wide "
            "as queries, values of the keys' heads, which divide the queries'"
        )
    if documents is not None and (documents.shape != (q.shape[0], q.shape[2]) or documents.is_floating_point()):
        raise ValueError(f"documents are whole numbers [batch, tokens], not {documents.dtype} {tuple(documents.shape)}")
