"""Numbers in 8 and 4 bits with scales, in a few lines each: what they keep, and what they lose.

A format in few bits has a range of its own, and a scale brings a tensor's numbers, or a block's, into it:

| name | a number | a scale | for | bits a number |
|---|---|---|---|---|
| ``int8`` | −127 to 127 | fp32 | 128 numbers | 8.25 |
| ``e4m3`` | ±448, three bits after the point | fp32 | a tensor | 8 |
| ``e5m2`` | ±57,344, two bits after the point | fp32 | a tensor | 8 |
| ``mxfp8`` | as e4m3 | a power of two (E8M0) | 32 numbers | 8.25 |
| ``nvfp4`` | 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives | e4m3, and fp32 for a tensor | 16 numbers | 4.5 |

Sources: Micikevicius et al. 2022, "FP8 formats for deep learning" (arXiv 2209.05433); OCP Microscaling Formats 1.0, 6.3
(the scale is 2^(⌊log₂ largest⌋ − 8), and what is above 448 after that is cut off); NVIDIA 2025, "Pretraining large
language models with NVFP4" (arXiv 2509.25149).

What shares a scale with a number that is not finite comes back as NaN, of ``nvfp4`` the whole tensor: what overflowed
is seen, and no wrong sum comes of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
#: E2M1's numbers by code, and from where on each is the nearest; a number in the middle goes to the even code.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_UP = {1, 3, 5}  # of the seven middles between neighbours, those that go to the larger one


@dataclass(frozen=True)
class Encoded:
    """A tensor in few bits. ``parts``: what would be stored or sent; ``shape`` and ``dtype``: of what it was."""

    format: str
    parts: tuple[torch.Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all parts, scales included."""
        return sum(part.numel() * part.element_size() for part in self.parts)


@dataclass(frozen=True)
class Format:
    """``encode``: numbers [blocks, block] in fp32 to parts; ``decode``: back. ``block``: numbers that share a scale, 0
    for the whole tensor."""

    block: int
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    decode: Callable[..., torch.Tensor]


def encode(tensor: torch.Tensor, name: str) -> Encoded:
    """``tensor``, of any shape, in a format; the last block is filled up with zeros.

    Raises:
        ValueError: there is no such format. TypeError: no floating-point numbers.
    """
    if name not in FORMATS:
        raise ValueError(f"no format {name!r}; there are {', '.join(FORMATS)}")
    if not tensor.is_floating_point():
        raise TypeError(f"floating-point numbers are put into few bits, not {tensor.dtype}")
    form, flat = FORMATS[name], tensor.detach().reshape(-1).float()
    blocks = F.pad(flat, (0, -len(flat) % form.block)).view(-1, form.block) if form.block else flat.view(1, -1)
    return Encoded(name, form.encode(blocks), tensor.shape, tensor.dtype)


def decode(encoded: Encoded) -> torch.Tensor:
    """The numbers that ``encoded`` stands for, in its dtype and shape."""
    flat = FORMATS[encoded.format].decode(*encoded.parts).reshape(-1)
    return flat[: encoded.shape.numel()].view(encoded.shape).to(encoded.dtype)


def rounded(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` as it comes back from a format."""
    return decode(encode(tensor, name))


def _int8(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = _nonzero(_largest(blocks) / 127)
    return (blocks / scales).round().nan_to_num().to(torch.int8), scales


def _from_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes * _or_nan(scales)


def _fp8(kind: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def to_codes(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales = _nonzero(_largest(blocks) / LARGEST[kind])
        return (blocks / scales).clamp(-LARGEST[kind], LARGEST[kind]).to(kind), scales

    return to_codes, lambda codes, scales: codes.float() * _or_nan(scales)


def _mxfp8(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    largest = _largest(blocks)
    exponents = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - 8, -127).clamp(-127, 127)
    scales = torch.ldexp(torch.ones_like(largest), exponents)
    codes = (blocks / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = torch.where(largest.isfinite(), exponents + 127, 255)  # E8M0; 255 is NaN
    return codes, stored.to(torch.uint8)


def _from_mxfp8(codes: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    scales = torch.ldexp(torch.ones(stored.shape, device=stored.device), stored.int() - 127)
    return codes.float() * scales.masked_fill(stored == 255, torch.nan)


def _nvfp4(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    largest = _largest(blocks)
    tensor_scale = _nonzero(largest.max() / (6 * 448)) if len(largest) else largest.new_ones(())
    scales = (largest / 6 / tensor_scale).clamp(max=448).to(torch.float8_e4m3fn)
    divided = blocks / _nonzero(scales.float() * tensor_scale)
    middles = (FP4[1:] + FP4[:-1]) / 2
    below = torch.nextafter(middles, torch.zeros(()))
    ends = torch.stack([below[index] if index in _UP else middles[index] for index in range(7)]).to(blocks.device)
    codes = torch.bucketize(divided.abs().nan_to_num(), ends).to(torch.uint8) + 8 * (divided < 0)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), scales, tensor_scale.reshape(1)


def _from_nvfp4(packed: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(-2).long()
    numbers = torch.cat([FP4, -FP4]).to(packed.device)[codes]
    return numbers * (scales.float() * _or_nan(tensor_scale))


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 1]; NaN where a number is NaN."""
    return blocks.abs().amax(-1, keepdim=True) if blocks.numel() else blocks.new_zeros(len(blocks), 1)


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """1 where nothing is to be scaled."""
    return torch.where(scales == 0, 1.0, scales)


def _or_nan(scales: torch.Tensor) -> torch.Tensor:
    return scales.masked_fill(~scales.isfinite(), torch.nan)


FORMATS = {
    "int8": Format(128, _int8, _from_int8),
    "e4m3": Format(0, *_fp8(torch.float8_e4m3fn)),
    "e5m2": Format(0, *_fp8(torch.float8_e5m2)),
    "mxfp8": Format(32, _mxfp8, _from_mxfp8),
    "nvfp4": Format(16, _nvfp4, _from_nvfp4),
}


def to_bf16_by_chance(tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Rounds an fp32 ``tensor`` to bf16 by chance: to one of the two neighbours, so that it is right on average.

    bf16 has 8 bits: an update of a weight by less than 1/256 of it is rounded away, every time. Rounded up with the
    probability of its share, it arrives on average (Gupta et al. 2015, arXiv 1502.02551, 3). A random number of 16 bits
    is added to fp32's lower 16 bits, which bf16 has not, and they are cut off.

    Raises:
        TypeError: not fp32.
    """
    if tensor.dtype != torch.float32:
        raise TypeError(f"fp32 is rounded to bf16 by chance, not {tensor.dtype}")
    bits = tensor.detach().contiguous().view(torch.int32)
    chance = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    moved = torch.where(tensor.isfinite(), bits + chance, bits)
    # a NaN whose only bits are among the lower 16 would be cut to an infinity
    return (moved & -65536).view(torch.float32).to(torch.bfloat16).masked_fill_(tensor.isnan(), float("nan"))
