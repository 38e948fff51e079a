"""Attention with the heads divided among the ranks: each head is computed whole, by one rank, without a word."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pardemo.groups import group_of
from pardemo.tensor_parallel import exchange
from pardemo.tensor_parallel.full_layers import compare, linears, refuse_together, values_of
from pardemo.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pardemo.tensor_parallel.module import on_shards, sections_of
from pardemo.tensor_parallel.probes import DimPart, name_of, numbers, probe
from pardemo.tensor_parallel.replicas import own_draws

#: A core is tried with so many tokens; one that does not run with them (a mask of its own), at its first forward.
PROBE_TOKENS = 8
#: query [b, heads, s, d], key and value [b, key/value heads, s, d] -> [b, heads, s, d]
Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ParallelAttention(nn.Module):
    """Self-attention with heads/t of the heads on each rank (1909.08053 3): query, key and value by columns, the
    output projection by rows; one all-reduce forward, one backward.

    Input and output [batch, sequence, hidden], or [batch, sequence/t, hidden] with ``sequence_parallel``.

    With fewer key/value heads than ranks each of them is on t/kv_heads ranks, which hold the same weights and sum their
    gradients: one all-reduce more backward, of both projections' whole gradients, 2·kv_heads·head_dim·(hidden + 1)
    numbers (the 1 where there are biases), of which each rank sends 2(t−1)/t. A head's part does not shrink with t.

    Args:
        qkv: the full fused projection, whose outputs are all of query, then key, then value, **each** cut by heads;
            or the three linear layers.
        out: the full output projection.
        heads: of the full layer. kv_heads: fewer for grouped-query attention; as many as ``heads`` when None.
        group: the tensor-parallel ranks; the default group when None.
        causal: no token sees a later one.
        core: what turns query, key and value into each head's output; scaled_dot_product_attention when None. A module
            may have parameters that all heads share, such as a norm over head_dim of query and key (Qwen3): every rank
            keeps a copy, and their gradients are summed over the ranks, one all-reduce more backward. It gives each
            head what it would give it among all of them: it is run once on random numbers of all heads and of this
            rank's, and compared. Slopes, or a bias, of each head (ALiBi, T5) it takes from what belongs to this
            rank's heads, rank·heads/t and those behind it, and does not compute them from ``q.shape[1]``.
        recompute_core: selective recomputation (2205.05198 5): keep query, key and value only, and run the core once
            more on the way back.
        sequence_parallel, keep_gathered, overlap: as in :class:`ColumnParallelLinear`.

    Made by all ranks of the group together.

    Raises:
        ValueError: heads do not divide by the ranks, by the key/value heads, or the projections do not fit the heads;
            key/value heads neither divide by the ranks nor the ranks by them; the ranks' full layers or cores differ; a
            core that is a function uses parameters, or a core reads the number of heads or mixes heads (where it
            only runs at the real length, as with a mask of its own, the first forward says so).
        TypeError: a layer is not a plain ``nn.Linear``.
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
        copies = group.size() // kv_heads if kv_heads and group.size() % kv_heads == 0 else 1
        self.kv_heads_here = exchange.share(kv_heads * copies, group, "a number of key/value heads")
        self.causal, self.recompute_core = causal, recompute_core
        self._all_heads = heads, kv_heads
        self._kv_start = dist.get_rank(group) // copies * self.kv_heads_here
        self.core = self._copy_of(core, group)
        self._probed = core is None or group.size() == 1 or out.weight.is_meta
        self._probed = self._probed or self._probe(group, out.weight, PROBE_TOKENS)
        shared = {"sequence_parallel": sequence_parallel, "keep_gathered": keep_gathered, "overlap": overlap}
        self.qkv = ColumnParallelLinear(qkv, group, sections=sections, copies=[1, copies, copies], **shared)
        self.out = RowParallelLinear(out, group, sequence_parallel=sequence_parallel)  # [h, heads/t·d] here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = sections_of(self.qkv(x), self.qkv.sections)  # [b, s, heads/t·d], twice [b, s, kv_heads/t·d]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3) for part in parts)  # [b, heads/t, s, d]
        if not self._probed and not torch.compiler.is_compiling():
            self._probed = True
            self._probe(self.out.group, q, q.shape[-2])
        core = partial(on_shards, self.core, self.out.group) if isinstance(self.core, nn.Module) else self.core
        if self.recompute_core and torch.is_grad_enabled():
            heads = own_draws(checkpoint, core, q, k, v, use_reentrant=False)
        else:
            heads = own_draws(core, q, k, v)  # [b, heads/t, s, d]
        return self.out(heads.transpose(-2, -3).flatten(-2))  # [b, s, h]

    def _copy_of(self, core: Core | None, group: dist.ProcessGroup) -> Core:
        if core is None:
            return self._scaled_dot_product
        if isinstance(core, nn.Module):
            compare("ParallelAttention", values_of(core, "core"), group)
            return copy.deepcopy(core)
        return core

    def _probe(self, group: dist.ProcessGroup, like: torch.Tensor, tokens: int) -> bool:
        """Runs the core on all heads and on this rank's, and raises a ValueError where they get other results.

        Returns whether it could be run with so many tokens.
        """
        here, kv_here = self.heads_here, self.kv_heads_here
        heads, kv_heads = self._all_heads
        q, k, v = (numbers(1, n, tokens, self.head_dim, like=like) for n in (heads, kv_heads, kv_heads))
        first = dist.get_rank(group) * here
        own, own_kv = DimPart(-3, first, here), DimPart(-3, self._kv_start, kv_here)
        answer = probe(self.core, [q, k, v], [own, own_kv, own_kv], f"heads {first} to {first + here - 1}")
        name, objection = name_of(self.core), None
        if answer.trained:
            objection = (
                f"the core {name} uses parameters, which each rank would train for itself: make it a module of its own"
            )
        elif answer.objection:
            objection = (
                f"the core {name} {answer.objection}: it mixes heads, or reads how many there are; "
                "give it what belongs to this rank's heads, such as their slopes"
            )
        refuse_together("ParallelAttention", objection, group)
        return answer.ran

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
    layers = linears(qkv)
    widths = [layer.out_features for layer in layers]
    if widths not in (sections, [sum(sections)]):
        wanted = " + ".join(map(str, sections))
        raise ValueError(
            f"query, key and value of {heads} and {kv_heads} heads of {head} need {wanted} outputs, "
            f"not {' + '.join(map(str, widths))}"
        )
    return sections
