"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Iterator

import torch

from pardemo.book.page.exercises import exercise, formula
from pardemo.formulas import low_precision as formulas
from pardemo.low_precision import rounded
from pardemo.small_models import gpt


@formula(((4, 3), (5, 2), (3, 2), (3, 4)), "Right: 448 for E4M3, where IEEE's rule would have stopped at 240.")
def check_largest(exponent: int, fraction: int):
    """The largest number of a format whose very last code alone is NaN."""
    right = formulas.largest(exponent, fraction, 1)
    return right, [
        (formulas.largest(exponent, fraction), "the very last code is NaN, so the fraction is one less"),
        (
            formulas.largest(exponent, fraction, 1 << fraction),
            "that is IEEE's rule, which gives the whole last exponent to infinity and NaN",
        ),
        (2 * right, "the bias is 2^(exponent − 1) − 1"),
        (right / 2, "the bias is 2^(exponent − 1) − 1"),
    ]


@formula(
    ((1 << 20, 8, 8, 32, 4), (1 << 20, 4, 8, 16, 8), (1 << 22, 8, 32, 128, 2)),
    "Right: 8.25 bits a number for MXFP8 and 4.5 for NVFP4, and (N−1)/N of them.",
    unit="bytes",
)
def check_bill(numbers: int, code_bits: float, scale_bits: float, block: int, ranks: int):
    """The bytes that a rank's reduce-scatter sends."""
    right = formulas.half_bytes(numbers, formulas.bits_a_number(code_bits, scale_bits, block), ranks)
    return right, [
        (formulas.half_bytes(numbers, code_bits, ranks), "the scales travel, too"),
        (8 * right, "these are bits"),
        (2 * right, "that is an all-reduce"),
        (right * ranks / (ranks - 1), "a rank keeps its own part, and sends (N−1)/N"),
        (formulas.half_bytes(numbers, code_bits + scale_bits, ranks), "a scale serves a whole block"),
    ]


def _blocks(draw: random.Random) -> Iterator[tuple[torch.Tensor]]:
    for size in (3e-4, 90):
        yield (gpt.numbers(32, seed=draw.randrange(2**31)) * size,)
    cut_off = torch.full((32,), 0.75)
    cut_off[0] = 500.0  # between 448 and 512: the block's scale is 1, and this is cut off
    yield (cut_off,)


@formula(
    _blocks,
    "Right: a power of two as the scale, E4M3's numbers, and what is above 448 cut off.",
    asked="the 32 numbers as a tensor",
    abs=0.0,
)
def check_block(block: torch.Tensor):
    """32 numbers as they come back from MXFP8."""
    return rounded(block, "mxfp8"), [
        (
            lambda answer: answer.isnan().any(),
            "there are NaNs: after the division the largest may lie above 448, and has to be cut off",
        ),
        (block, "these are the numbers as they came: nothing was rounded"),
        (rounded(block, "e4m3"), "this scale is largest/448. MXFP8 stores a scale in one byte, as a power of two"),
        (lambda _: True, "these are not MXFP8's numbers: the scale is 2 to the power of ⌊log₂ largest⌋ − 8"),
    ]


@exercise("largest")
def my_largest(exponent, fraction):
    """Which power of two belongs to an exponent of ones only, and which fraction is the largest that is still a
    number?"""
    bias = 2 ** (exponent - 1) - 1
    power = 2**exponent - 1 - bias  # an exponent of ones only
    # The largest fraction means NaN; the one below it is the largest number's.
    return (2 - 2 * 2**-fraction) * 2**power


@exercise("bill")
def my_sent(numbers, code_bits, scale_bits, block, ranks):
    """How many bits does a number take with its share of the scale? Then a reduce-scatter sends what it always
    sends."""
    bits = code_bits + scale_bits / block  # a scale serves its whole block
    return (ranks - 1) / ranks * numbers * bits / 8


@exercise("block")
def my_mxfp8(block):
    """Bring the block's largest number between 2⁸ and 2⁹, as far as a power of two can. What may then still lie
    above 448?"""
    # E4M3's largest number, 448, lies between 2⁸ and 2⁹.
    power = torch.frexp(block.abs().max()).exponent - 1 - 8
    scale = torch.ldexp(torch.ones(()), power)
    codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float() * scale
