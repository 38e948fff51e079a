"""An MLP, attention and a whole transformer block, cut first by columns, then by rows."""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import compat
from pardemo.groups import divide, group_of
from pardemo.tensor_parallel.full_layers import compare_layers, linears, values_of
from pardemo.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pardemo.tensor_parallel.module import GroupModule, on_shards, refuse_batch_norm, sections_of

#: query [b, heads, s, d], key and value [b, key/value heads, s, d] -> [b, heads, s, d]
Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ParallelMLP(nn.Module):
    """Z = Σᵢ GeLU(XW₁⁽ⁱ⁾)W₂⁽ⁱ⁾ (1909.08053 3): W₁ by columns, so that a rank's GeLU needs no other rank; W₂ by rows.

    One all-reduce forward, one backward. Input and output [batch, sequence, hidden], or [batch, sequence/t, hidden]
    with ``sequence_parallel``.

    Args:
        first: the full layer of W₁; or the pair (gate, up) of a gated MLP, activation(gate(x))·up(x).
        second: the full layer of W₂.
        group: the tensor-parallel ranks; the default group when None.
        activation: element by element, without parameters of its own, with dropout if you like: each rank has other
            columns.
        sequence_parallel: as in :class:`ColumnParallelLinear`.

    Raises:
        ValueError: the inner width does not divide by the ranks, the layers do not fit one another or differ between
            the ranks; the activation has parameters, which each rank would train for itself.
        TypeError: a layer is not a plain ``nn.Linear``.
    """

    def __init__(
        self,
        first: nn.Linear | Sequence[nn.Linear],
        second: nn.Linear,
        group: dist.ProcessGroup | None = None,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        layers = linears(first)
        widths = [layer.out_features for layer in layers]
        if len(layers) > 2 or set(widths) != {second.in_features}:
            raise ValueError(f"the first layers' outputs, {widths}, are not the second's {second.in_features} inputs")
        if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
            raise ValueError(f"{type(activation).__name__} has parameters, which each rank would train for itself")
        self.activation, self.gated = activation, len(layers) == 2
        self.first = ColumnParallelLinear(layers, group, sequence_parallel=sequence_parallel)
        self.second = RowParallelLinear(second, group, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)  # [b, s, inner/t], of both gate and up where there are two
        if self.gated:
            gate, up = sections_of(inner, self.first.sections)  # [b, s, inner/t] each
            return self.second(self.activation(gate) * up)  # [b, s, h]
        return self.second(self.activation(inner))  # [b, s, h]


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
            keeps a copy, and their gradients are summed over the ranks, one all-reduce more backward. It sees this
            rank's heads alone, rank·heads/t and those behind it: slopes, or a bias, of each head (ALiBi, T5) it takes
            from what belongs to these, and does not compute them from ``q.shape[1]``.
        sequence_parallel: as in :class:`ColumnParallelLinear`.

    Made by all ranks of the group together.

    Raises:
        ValueError: heads do not divide by the ranks, by the key/value heads, or the projections do not fit the heads;
            key/value heads neither divide by the ranks nor the ranks by them; the ranks' full layers or cores differ.
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
        sequence_parallel: bool = False,
    ):
        super().__init__()
        group, ranks = group_of(group), group_of(group).size()
        kv_heads = heads if kv_heads is None else kv_heads
        sections = _sections(qkv, out, heads, kv_heads)
        copies = ranks // kv_heads if ranks % kv_heads == 0 else 1
        divide(heads, group, "a number of heads")
        divide(kv_heads * copies, group, "a number of key/value heads")
        self.head_dim, self.causal, self.core = out.in_features // heads, causal, core
        if isinstance(core, nn.Module):
            compare_layers("ParallelAttention", values_of(core, "core"), group)
            self.core = copy.deepcopy(core)
        self.qkv = ColumnParallelLinear(
            qkv, group, sections=sections, copies=[1, copies, copies], sequence_parallel=sequence_parallel
        )
        self.out = RowParallelLinear(out, group, sequence_parallel=sequence_parallel)  # [h, heads/t·d] here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = sections_of(self.qkv(x), self.qkv.sections)  # [b, s, heads/t·d], twice [b, s, kv_heads/t·d]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3) for part in parts)  # [b, heads/t, s, d]
        if self.core is None:
            grouped = q.shape[-3] != k.shape[-3]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        elif isinstance(self.core, nn.Module):
            y = on_shards(self.core, self.out.group, q, k, v)
        else:
            y = self.core(q, k, v)  # [b, heads/t, s, d]
        return self.out(y.transpose(-2, -3).flatten(-2))  # [b, s, h]

    def extra_repr(self) -> str:
        q, k, _ = self.qkv.sections
        return f"{q // self.head_dim} heads of {self.head_dim} here, {k // self.head_dim} for key and value"


class ParallelBlock(GroupModule):
    """x + attention(norm(x)), then x + mlp(norm(x)): two all-reduces forward, two backward.

    Input and output [batch, sequence, hidden]. With sequence-parallel layers they are [batch, sequence/t, hidden] (see
    ``scatter_sequence``), norms and dropout run on this rank's tokens, and each all-reduce becomes a reduce-scatter and
    an all-gather.

    Args:
        norm_1, norm_2: the full norms; every rank keeps a copy.
        attention, mlp: parallel layers of one group, all with or all without ``sequence_parallel``. Dropout belongs in
            an attention's core or in an activation, where each rank has elements of its own; elsewhere only with
            ``sequence_parallel``: ranks that hold the same tokens would each drop others of them.

    Made by all ranks of the group together.

    Raises:
        ValueError: the layers inside have several groups, or ``sequence_parallel`` some alone; the norms differ between
            the ranks; there is dropout on tokens that all ranks hold, or with ``sequence_parallel`` batch norm.
    """

    def __init__(self, norm_1: nn.Module, attention: nn.Module, norm_2: nn.Module, mlp: nn.Module):
        inside = [*attention.modules(), *mlp.modules()]
        layers = [m for m in inside if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
        if len({(layer.group, layer.sequence_parallel) for layer in layers}) != 1:
            raise ValueError("a block's layers have one group, and all sequence_parallel or none")
        super().__init__(layers[0].group)
        self.sequence_parallel = layers[0].sequence_parallel
        for part in (norm_1, attention, norm_2, mlp):
            refuse_batch_norm(part) if self.sequence_parallel else _refuse_dropout(part)
        norms = values_of(norm_1, "norm_1") | values_of(norm_2, "norm_2")
        compare_layers("ParallelBlock", norms, self.group, sequence_parallel=self.sequence_parallel)
        self.norm_1, self.norm_2 = copy.deepcopy(norm_1), copy.deepcopy(norm_2)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self._norm(self.norm_1, x))  # [b, s, h], with sequence_parallel s/t
        return x + self.mlp(self._norm(self.norm_2, x))

    def _norm(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return on_shards(norm, self.group, x) if self.sequence_parallel else norm(x)


def _sections(qkv: nn.Linear | Sequence[nn.Linear], out: nn.Linear, heads: int, kv_heads: int) -> list[int]:
    """Widths of query, key and value; ValueError where the layers do not fit the heads."""
    if heads < 1 or out.in_features % heads:
        raise ValueError(f"an output projection over {out.in_features} does not divide into {heads} heads")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} heads do not divide into groups for {kv_heads} key/value heads")
    head = out.in_features // heads
    sections = [heads * head, kv_heads * head, kv_heads * head]
    widths = [layer.out_features for layer in linears(qkv)]
    if widths not in (sections, [sum(sections)]):
        raise ValueError(
            f"query, key and value of {heads} and {kv_heads} heads of {head} have {sections} outputs, not {widths}"
        )
    return sections


def _refuse_dropout(module: nn.Module) -> None:
    """Outside of attention and MLP every rank has the same tokens, and would draw a mask of its own."""
    if isinstance(module, ParallelAttention | ParallelMLP):
        return
    if isinstance(module, compat.DropoutNd) and module.p > 0:
        raise ValueError(
            f"{module} would drop other elements on every rank: put it into the attention's core or the activation, or "
            "use sequence_parallel=True"
        )
    for child in module.children():
        _refuse_dropout(child)
