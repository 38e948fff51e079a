"""The small language model: whole in one process, split over tensor-parallel ranks, cut into a pipeline's stages."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pardemo.groups import Groups
from pardemo.pipeline_parallel import cut_by_layers, cut_by_parameters
from pardemo.soak.layouts.case import DTYPES, Case
from pardemo.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelMLP,
    VocabParallelEmbedding,
    on_shards,
    vocab_parallel_cross_entropy,
)

IGNORED = -100


class Attention(nn.Module):
    """Grouped-query attention over a fused projection: all of query, then key, then value."""

    def __init__(self, case: Case):
        super().__init__()
        width = case.heads * case.head_dim
        self.heads, self.kv_heads, self.head_dim = case.heads, case.kv_heads, case.head_dim
        self.qkv = nn.Linear(width, (case.heads + 2 * case.kv_heads) * case.head_dim, bias=case.bias)
        self.out = nn.Linear(width, width, bias=case.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x).split(sizes, -1)
        )  # [b, heads, s, d]
        grouped = self.heads != self.kv_heads
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        width, self.gated = case.heads * case.head_dim, case.gated
        self.first = nn.ModuleList(nn.Linear(width, case.inner, bias=case.bias) for _ in range(1 + case.gated))
        self.second = nn.Linear(case.inner, width, bias=case.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.first[0](x))
        return self.second(inner * self.first[1](x) if self.gated else inner)


class Block(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        width, norm = case.heads * case.head_dim, nn.RMSNorm if case.rms_norm else nn.LayerNorm
        self.norm_1, self.attention, self.norm_2, self.mlp = norm(width), Attention(case), norm(width), MLP(case)
        self.in_place = case.in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.leaky_relu_(x, 0.5) if self.in_place else x
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Sometimes(nn.Module):
    """A layer that is left out unless it is switched on."""

    def __init__(self, width: int):
        super().__init__()
        self.linear, self.on = nn.Linear(width, width), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) if self.on else x


class Head(nn.Module):
    """Norm and logits, and perhaps a layer that nothing uses."""

    def __init__(self, case: Case):
        super().__init__()
        width = case.heads * case.head_dim
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, case.vocabulary, bias=False)
        self.never = nn.Linear(3, 3) if case.never else None
        for dtype in (torch.int16, torch.float8_e4m3fn, torch.bool) if case.buffers else ():
            self.register_buffer(str(dtype).removeprefix("torch."), torch.zeros(3).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


class SplitHead(nn.Module):
    """A :class:`Head` whose logits are divided over the vocabulary."""

    def __init__(self, head: Head, case: Case, group: dist.ProcessGroup):
        super().__init__()
        self.group, self.sequence_parallel = group, case.sequence_parallel
        self.norm, self.never = copy.deepcopy(head.norm), copy.deepcopy(head.never)
        self.linear = ColumnParallelLinear(
            head.linear,
            group,
            sequence_parallel=case.sequence_parallel,
            gather_output=not case.vocabulary_loss,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(on_shards(self.norm, self.group, x) if self.sequence_parallel else self.norm(x))


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, how: str):
        super().__init__()
        self.layer, self.reentrant = layer, how == "reentrant"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def plain(case: Case) -> nn.Sequential:
    """The whole model: embedding, blocks, head; the same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(case.number)
        layers = [nn.Embedding(case.vocabulary, case.heads * case.head_dim), *(Block(case) for _ in range(case.layers))]
        if case.sometimes:
            layers.append(Sometimes(case.heads * case.head_dim))
        model = nn.Sequential(*layers, Head(case)).to(DTYPES[case.dtype])
    if case.tied:
        _tie(model[-1], tied_weight(model[0]))
    for name in case.frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def place(model: nn.Sequential, case: Case, groups: Groups) -> list[nn.Sequential]:
    """What this rank holds of a whole model: a chunk for each of its stages; of one that is not cut, all."""
    layers = list(model)
    if case.tp > 1:
        layers = [_split(layer, case, groups.tp) for layer in layers]
        if case.tied:
            _tie(layers[-1], tied_weight(layers[0]))
    if case.checkpointing:
        layers = [
            Checkpointed(layer, case.checkpointing) if isinstance(layer, (Block, ParallelBlock)) else layer
            for layer in layers
        ]
    if case.pp == 1:
        return [nn.Sequential(*layers)]
    if case.tied:  # stages have copies of their own
        weight = tied_weight(layers[0])
        _tie(layers[-1], nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad))
    cut = cut_by_parameters if case.by_parameters else cut_by_layers
    return cut(layers, case.pp * case.chunks)[dist.get_rank(groups.pp) :: case.pp]


def tied_weight(layer: nn.Module) -> nn.Parameter:
    """Of the embedding or of the head, whole or split: the weight that the two share."""
    weight = layer.linear.weight if isinstance(layer, (Head, SplitHead)) else layer.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _tie(head: nn.Module, weight: nn.Parameter) -> None:
    assert isinstance(head, (Head, SplitHead))
    head.linear.weight = weight


def _split(layer: nn.Module, case: Case, group: dist.ProcessGroup) -> nn.Module:
    shared: dict[str, Any] = {"sequence_parallel": case.sequence_parallel}
    if isinstance(layer, nn.Embedding):
        return VocabParallelEmbedding(layer, group, **shared)
    if isinstance(layer, Head):
        return SplitHead(layer, case, group)
    assert isinstance(layer, Block)
    own = layer.attention
    attention = ParallelAttention(own.qkv, own.out, case.heads, case.kv_heads, group, **shared)
    first = [linear for linear in layer.mlp.first if isinstance(linear, nn.Linear)]
    mlp = ParallelMLP(first, layer.mlp.second, group, **shared)
    return ParallelBlock(layer.norm_1, attention, layer.norm_2, mlp)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens that count; bf16 logits [b, s, v] in fp32, as every framework does."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def parallel_loss(case: Case, groups: Groups) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The loss of what :func:`place` gives."""
    if case.tp == 1 or not case.vocabulary_loss:
        return loss_of
    return lambda logits, targets: vocab_parallel_cross_entropy(logits, targets, groups.tp, ignore_index=IGNORED)


def batch(case: Case, step: int, micro: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets [samples, sequence] of each data-parallel rank."""
    generator = torch.Generator().manual_seed(1_000_000 * case.number + 1000 * step + micro)
    found = []
    for samples in case.samples:
        tokens, targets = torch.randint(case.vocabulary, (2, samples, case.sequence), generator=generator)
        if case.ignored:
            targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORED
            targets[0, 0] = 0  # at least one counts
        found.append((tokens, targets))
    return found


def switch(model: nn.Module, on: bool) -> None:
    for part in model.modules():
        if isinstance(part, Sometimes):
            part.on = on
