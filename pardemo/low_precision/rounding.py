"""Rounding up or down by chance, so that what is too small to change a sum changes it now and then.

A weight in bf16 has 8 bits: an update of less than 1/256 of it is rounded away, every time. Rounded up with the
probability of its share, it arrives on average (Gupta et al. 2015, arXiv 1502.02551, 3).
"""

import torch


def to_bf16_by_chance(tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """fp32 ``tensor`` in bf16: one of the two neighbours, with the probabilities that make it right on average.

    fp32's lower 16 bits are what bf16 has not: a random number of 16 bits is added and they are cut off.

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
