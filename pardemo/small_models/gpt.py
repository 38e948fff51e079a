"""A plain GPT in one process, and the same network from pardemo's tensor-parallel layers.

The plain one is what every split is compared with: same weights on every rank, whatever state its generator is in.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelMLP,
    VocabParallelEmbedding,
    on_shards,
    scatter_sequence,
    vocab_parallel_cross_entropy,
)


class MLP(nn.Module):
    """GeLU(XW₁)W₂ with an inner width of 4·hidden."""

    def __init__(self, hidden: int, bias: bool = True):
        super().__init__()
        self.first = nn.Linear(hidden, 4 * hidden, bias=bias)
        self.second = nn.Linear(4 * hidden, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x)))


class Attention(nn.Module):
    """Causal self-attention; ``qkv`` holds all of query, then key, then value."""

    def __init__(self, hidden: int, heads: int, kv_heads: int | None = None, bias: bool = True):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(x).split(widths, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int, kv_heads: int | None = None):
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads, kv_heads)
        self.norm_2, self.mlp = nn.LayerNorm(hidden), MLP(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, vocabulary]; learned positions, tied embedding."""

    embedding: Any  # as the others here, of another class where it is cut over ranks
    blocks: Any
    head: Any

    def __init__(self, vocabulary: int = 512, hidden: int = 64, layers: int = 2, heads: int = 4, sequence: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last_norm(x))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Changes the embedded tokens before the first block: here not at all."""
        return x

    def last_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of each next token; tokens [batch, sequence + 1]."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class ParallelGPT(GPT):
    """The same network with every layer of ``gpt`` divided over ``group``."""

    def __init__(self, gpt: GPT, group: dist.ProcessGroup | None = None, sequence_parallel: bool = False):
        nn.Module.__init__(self)
        self.sequence_parallel = sequence_parallel
        self.embedding = VocabParallelEmbedding(gpt.embedding, group)
        self.positions = copy.deepcopy(gpt.positions)
        self.blocks = nn.ModuleList(
            parallel_block(block, group, sequence_parallel=sequence_parallel) for block in gpt.blocks
        )
        self.norm = copy.deepcopy(gpt.norm)
        self.head = ColumnParallelLinear(gpt.head, group, sequence_parallel=sequence_parallel)
        self.head.weight = self.embedding.weight  # tied within the rank: the same rows of the vocabulary

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return scatter_sequence(x, self.head.group) if self.sequence_parallel else x

    def last_norm(self, x: torch.Tensor) -> torch.Tensor:
        return on_shards(self.norm, self.head.group, x) if self.sequence_parallel else self.norm(x)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(self(tokens[:, :-1]), tokens[:, 1:], self.head.group)


class Entrance(nn.Module):
    """A GPT before its first block, plain or parallel: tokens [batch, sequence] to [batch, sequence, hidden]."""

    def __init__(self, gpt: GPT):
        super().__init__()
        self.embedding, self.positions = gpt.embedding, gpt.positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]


def layers_of(gpt: GPT) -> list[nn.Module]:
    """A GPT without sequence parallelism as the layers that a pipeline cuts; the first and the last share a weight."""
    return [Entrance(gpt), *gpt.blocks, gpt.norm, gpt.head]


Made = TypeVar("Made", bound=nn.Module)


def seeded(make: Callable[[], Made], seed: int = 0) -> Made:
    """``make()`` with the same weights on every rank, biases not zero; the rank's own generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make()
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.02)
    return module


def linear_stack(width: int, layers: int, outputs: int | None = None) -> nn.Sequential:
    """Linear layers without biases, with the same weights on every rank; ``outputs`` of each: ``width`` by default."""
    return seeded(lambda: nn.Sequential(*[nn.Linear(width, outputs or width, bias=False) for _ in range(layers)]))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal random numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def text(samples: int, length: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Token numbers [samples, length], each mostly a fixed function of the one before: something to learn."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (samples, length), generator=generator)
    chance = torch.rand(samples, length, generator=generator) < 0.2
    for index in range(1, length):
        follows = (tokens[:, index - 1] * 7 + 3) % vocabulary
        tokens[:, index] = torch.where(chance[:, index], tokens[:, index], follows)
    return tokens


def parallel_mlp(mlp: MLP, group: dist.ProcessGroup | None = None, **options: Any) -> ParallelMLP:
    """This rank's part of a plain MLP."""
    return ParallelMLP(mlp.first, mlp.second, group, **options)


def parallel_attention(attention: Attention, group: dist.ProcessGroup | None = None, **options) -> ParallelAttention:
    """This rank's part of a plain attention."""
    return ParallelAttention(attention.qkv, attention.out, attention.heads, attention.kv_heads, group, **options)


def parallel_block(block: Block, group: dist.ProcessGroup | None = None, **options: bool) -> ParallelBlock:
    """This rank's part of a plain block."""
    return ParallelBlock(
        block.norm_1,
        parallel_attention(block.attention, group, **options),
        block.norm_2,
        parallel_mlp(block.mlp, group, **options),
    )


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """This rank's gradients by name."""
    return {name: p.grad for name, p in module.named_parameters()}


def gradients_as_weights(module: nn.Module) -> nn.Module:
    """A copy whose weights are the module's gradients: split like the module, it holds each rank's true gradients.

    They are the first rank's: on GPUs each rank's own may differ in their last bits, and layers are split only where
    all ranks hold the same.
    """
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter, gradient in zip(copied.parameters(), gradients(module).values(), strict=True):
            assert gradient is not None
            parameter.copy_(gradient)
            if dist.is_initialized():
                dist.broadcast(parameter.data, 0)
    return copied


def output_and_input_gradient(layer: Callable, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a forward and a backward pass; a module's weights' gradients are set anew."""
    if isinstance(layer, nn.Module):
        layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) / 1024)
    return y.detach(), x.grad  # type: ignore[return-value] # it was asked for


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖: a factor of 1.005 is an error of 0.005, however small the numbers are.

    Infinite where a number is not finite (``max`` would pass over a NaN), or where only the expected ones are all 0.
    """
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    error, size = (actual - expected).norm().item(), expected.norm().item()
    if error == 0:
        return 0.0
    return error / size if size and math.isfinite(error / size) else math.inf


def largest_error(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest :func:`relative_error` over all tensors.

    Raises:
        ValueError: not the same names.
    """
    if actual.keys() != expected.keys():
        raise ValueError(f"compared names differ: {sorted(actual.keys() ^ expected.keys())}")
    return max(relative_error(actual[name], expected[name]) for name in expected)
