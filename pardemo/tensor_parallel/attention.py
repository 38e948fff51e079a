"""Attention with the heads divided among the ranks: each head is computed whole, by one rank, without a word."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pardemo.groups import group_of
from pardemo.tensor_parallel import exchange
from pardemo.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

#: query [b, heads, s, d], key and value [b, key/value heads, s, d] -> [b, heads, s, d]
Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ParallelAttention(nn.Module):
    """Self-attention with heads/N of the heads on each rank (1909.08053 §3): query, key and value by columns, the
    output projection by rows; one all-reduce forward, one backward.

    Input and output [batch, sequence, hidden], or [batch, sequence/N, hidden] with ``sequence_parallel``.

    Args:
        qkv: the full fused projection, whose outputs are all of query, then key, then value, **each** cut by heads;
            or the three linear layers.
        out: the full output projection.
        heads: of the full layer. kv_heads: fewer for grouped-query attention; as many as ``heads`` when None.
        group: the tensor-parallel ranks; the default group when None.
        causal: no token sees a later one.
        core: what turns query, key and value into each head's output; scaled_dot_product_attention when None.
        recompute_core: selective recomputation (2205.05198 §5): keep query, key and value only, and run the core once
            more on the way back.
        sequence_parallel, keep_gathered, overlap: as in :class:`ColumnParallelLinear`.

    Raises:
        ValueError: heads do not divide by the ranks, by the key/value heads, or the projections do not fit the heads.
    """

    def __init__(
        self,
        qkv: nn.Linear | Sequence[nn.Linear],
        out: nn.Linear,
        heads: int,
        kv_heads: int | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        causal: bool = True,
        core: Core | None = None,
        recompute_core: bool = False,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
        overlap: bool = True,
    ):
        super().__init__()
        group = group_of(group)
        kv_heads = heads if kv_heads is None else kv_heads
        sections = _sections(qkv, out, heads, kv_heads)
        self.head_dim = out.in_features // heads
        self.heads_here = exchange.share(heads, group, "a number of heads")
        self.kv_heads_here = exchange.share(kv_heads, group, "a number of key/value heads")
        self.causal, self.recompute_core = causal, recompute_core
        self.core = core or self._scaled_dot_product
        shared = {"sequence_parallel": sequence_parallel, "keep_gathered": keep_gathered, "overlap": overlap}
        self.qkv = ColumnParallelLinear(qkv, group, sections=sections, **shared)
        self.out = RowParallelLinear(out, group, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)
            for part in self.qkv(x).split(self.qkv.sections, -1)
        )
        if self.recompute_core and torch.is_grad_enabled():
            heads = checkpoint(self.core, q, k, v, use_reentrant=False)
        else:
            heads = self.core(q, k, v)
        return self.out(heads.transpose(-2, -3).flatten(-2))

    def _scaled_dot_product(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = self.heads_here != self.kv_heads_here
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)

    def extra_repr(self) -> str:
        return f"{self.heads_here} heads of {self.head_dim} here, {self.kv_heads_here} for key and value"


def _sections(qkv: nn.Linear | Sequence[nn.Linear], out: nn.Linear, heads: int, kv_heads: int) -> list[int]:
    """Widths of query, key and value; ValueError where the layers do not fit the heads."""
    if heads < 1 or out.in_features % heads:
        raise ValueError(f"an output projection over {out.in_features} does not divide into {heads} heads")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} heads do not divide into groups for {kv_heads} key/value heads")
    head = out.in_features // heads
    sections = [heads * head, kv_heads * head, kv_heads * head]
    layers = [qkv] if isinstance(qkv, nn.Linear) else list(qkv)
    found = [layer.out_features for layer in layers]
    if found not in (sections, [sum(sections)]):
        wanted = " + ".join(map(str, sections))
        raise ValueError(
            f"query, key and value of {heads} and {kv_heads} heads of {head} need {wanted} outputs, "
            f"not {' + '.join(map(str, found))}"
        )
    return sections
