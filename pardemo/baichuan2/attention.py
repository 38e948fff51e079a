"""Computes attention's bias, one pattern per batch: the keys that a query sees, causal, ALiBi, padding and packing."""

import math
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def alibi_slopes(heads: int) -> list[float]:
    """One slope per head (Press et al., arXiv 2108.12409): powers of 2^(−8/n), and some between for other n than 2ᵏ."""
    closest = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / closest) for i in range(closest)]
    more = [2 ** (-8 * (i + 1) / (2 * closest)) for i in range(0, 2 * (heads - closest), 2)]
    return slopes + more


#: Queries of a block: with 200 to 500 of them a third of all pairs and more is left out. 128 took as long, 32 longer.
BLOCK = 64


class Pattern:
    """The attention pattern of one batch, made once and used by all its layers.

    ALiBi stands in its relative form, slope · (j − i), which equals the official slope · j after softmax and keeps its
    small numbers exact where a probability is not negligible. It stays in fp32 beside bf16 queries on a CPU, and is
    computed inside the kernel by FlexAttention. (In bf16 slope · j is off by whole units from 512 keys on.)

    Args:
        slopes: [heads], or None without ALiBi.
        queries, keys: lengths.
        padding: [b, keys], 0 where a key is padding; None where nothing is (or only behind all queries that count).
            Or the whole pattern as [b, 1 or heads, queries, keys]: true, or 0 in a mask to be added, where a key is
            seen.
        segments: [b, keys], a number per packed sample; attention stays within a sample.
        past: positions before the first query; by default the queries are the last of the keys. (A cache of fixed
            length has room behind them.)
    """

    def __init__(
        self,
        slopes: torch.Tensor | None,
        queries: int,
        keys: int,
        device: torch.device,
        padding: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        past: int | None = None,
    ):
        self.slopes, self.queries, self.keys, self.device = slopes, queries, keys, device
        self.past = keys - queries if past is None else past
        self.whole_pattern = self.padding = None
        if padding is not None and padding.dim() == 4:
            self.whole_pattern = _visible(padding)
        elif padding is not None:
            self.padding = _as_long(padding.bool(), keys)
        self.segments = segments

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flex: bool = False, blocks: bool = False
    ) -> torch.Tensor:
        """softmax(q·kᵀ/√d + bias)·v for q [b, h, queries, d], k and v [b, h, keys, d].

        ``blocks``: on a CPU each block of queries is called with the keys up to its end alone. That is causal, and the
        same but for rounding; in fp32, whose backward takes two thirds of bf16's time there.
        """
        if blocks and q.device.type == "cpu" and self.whole_pattern is None and BLOCK < self.queries == self.keys:
            return self._in_blocks(q, k, v)
        last = self.past + self.queries == self.keys
        alone = self.slopes is None and self.padding is None and self.whole_pattern is None and self.segments is None
        if alone and last and self.queries in (1, self.keys):
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.queries > 1)
        if flex and self.queries > 1 and self.whole_pattern is None:
            return self._flex(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask_for(q))

    def _in_blocks(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        queries, keys, values = q.to(wide), k.to(wide), v.to(wide)
        outputs = []
        with torch.autocast("cpu", enabled=False):  # which would round them again
            for begin in range(0, self.queries, BLOCK):
                end = min(begin + BLOCK, self.queries)
                mask = self._mask_for(queries)[:, :, begin:end, :end]
                part = queries[:, :, begin:end], keys[:, :, :end], values[:, :, :end]
                outputs.append(F.scaled_dot_product_attention(*part, attn_mask=mask))
        return torch.cat(outputs, 2).to(q.dtype)

    def weigh(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`attend` step by step, and the weights [b, h, queries, keys] too; the softmax in fp32."""
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).float()
        hidden = self._mask.dtype == torch.bool
        scores = scores.masked_fill(~self._mask, -torch.inf) if hidden else scores + self._mask
        weights = scores.softmax(-1).to(q.dtype)
        return weights @ v, weights

    def _mask_for(self, q: torch.Tensor) -> torch.Tensor:
        """The mask in the queries' type, made once for all layers; on a CPU in fp32 beside bf16.

        A GPU's fused kernels want the queries' type, and a CPU's takes fp32 beside fp64 for other numbers (torch 2.13).
        """
        if self._mask.dtype not in (torch.bool, q.dtype) and (q.is_cuda or q.dtype == torch.float64):
            self._mask = self._mask.to(q.dtype)
        return self._mask

    @cached_property
    def _mask(self) -> torch.Tensor:
        """[1 or b, 1 or heads, queries, keys]: the bias in fp32 with −∞ where nothing is seen; bool without ALiBi."""
        j = torch.arange(self.keys, device=self.device)
        i = j[self.past : self.past + self.queries, None]
        visible = (j <= i)[None, None] if self.whole_pattern is None else self.whole_pattern
        if self.padding is not None:  # a padding query sees itself: a row of −∞ alone would be no number
            visible = (visible & self.padding[:, None, None, :]) | (j == i)
        if self.segments is not None:
            of_query = self.segments[:, self.past : self.past + self.queries]
            visible = visible & (of_query[:, None, :, None] == self.segments[:, None, None, :])
        if self.slopes is None:
            return visible
        bias = self.slopes.float()[:, None, None] * (j - i)
        return bias.expand(visible.shape[0], -1, -1, -1).masked_fill(~visible, -torch.inf)

    def _flex(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        slopes, offset = self.slopes, self.past

        def fades(score, b, h, i, j):
            return score + slopes[h] * (j - i - offset)

        return _flex_attention(q.is_cuda)(q, k, v, score_mod=None if slopes is None else fades, block_mask=self._blocks)

    @cached_property
    def _blocks(self) -> BlockMask:
        padding, segments, offset = self.padding, self.segments, self.past

        def mask_mod(b, h, i, j):
            visible = j <= i + offset
            if padding is not None:
                visible = (visible & padding[b, j]) | (j == i + offset)
            if segments is not None:
                visible = visible & (segments[b, i + offset] == segments[b, j])
            return visible

        batch = next((len(t) for t in (padding, segments) if t is not None), None)
        return create_block_mask(mask_mod, batch, None, self.queries, self.keys, device=self.device)


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask that others made, bool or to be added, lets a key be seen; a query that sees nothing sees all."""
    visible = mask if mask.dtype == torch.bool else mask >= 0
    return visible | ~visible.any(-1, keepdim=True)


def _as_long(padding: torch.Tensor, keys: int) -> torch.Tensor:
    """[b, keys]: the room behind, in a cache of fixed length, is hidden by causality."""
    return F.pad(padding, (0, keys - padding.shape[1]), value=True) if padding.shape[1] < keys else padding[:, :keys]


@lru_cache
def _flex_attention(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE, half rotation (Su et al., arXiv 2104.09864), in fp32; x [b, h, s, d], cos and sin [b, 1, s, d]."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def rotation(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the angles [b, 1, s, dim] for positions [b, s], in fp32."""
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = (positions[:, None, :, None].float() * frequencies).repeat(1, 1, 1, 2)
    return angles.cos(), angles.sin()
