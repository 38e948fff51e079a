"""The exercises of this chapter, and what checks an answer to each."""

import math
from collections.abc import Callable

import torch

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed
from pardemo.formulas import low_precision as formulas
from pardemo.low_precision import rounded
from pardemo.small_models import gpt

EXERCISES = {
    "largest": Exercise(
        "my_largest",
        "Which power of two belongs to an exponent of ones only, and which fraction is the largest that is still a "
        "number?",
    ),
    "bill": Exercise(
        "my_sent",
        "How many bits does a number take with its share of the scale? Then a reduce-scatter sends what it always "
        "sends.",
    ),
    "block": Exercise(
        "my_mxfp8",
        "Bring the block's largest number between 2⁸ and 2⁹, as far as a power of two can. What may then still lie "
        "above 448?",
    ),
}


def check_largest(function: Callable[[int, int], float]) -> str:
    """``function(exponent, fraction)`` is the largest number of a format whose very last code alone is NaN."""
    for exponent, fraction in ((4, 3), (5, 2), (3, 2), (3, 4)):
        answer, expected = call(function, exponent, fraction), formulas.largest(exponent, fraction, 1)
        where = f"With {exponent} bits of exponent and {fraction} of fraction"
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            raise Mistake(f"{where} it returned {type(answer).__name__}, not a number.")
        if math.isclose(answer, expected):
            continue
        for wrong, hint in (
            (formulas.largest(exponent, fraction), "the very last code is NaN, so the fraction is one less"),
            (formulas.largest(exponent, fraction, 1 << fraction),
             "that is IEEE's rule, which gives the whole last exponent to infinity and NaN"),
            (2 * expected, "the bias is 2^(exponent − 1) − 1"),
            (expected / 2, "the bias is 2^(exponent − 1) − 1"),
        ):  # fmt: skip
            if math.isclose(answer, wrong):
                raise Mistake(f"{where} the largest is {expected:g}, not {answer:g}: {hint}.")
        raise Mistake(f"{where} the largest is {expected:g}, not {answer:g}.")
    return "Right: 448 for E4M3, where IEEE's rule would have stopped at 240."


def check_bill(function: Callable[[int, float, float, int, int], float]) -> str:
    """``function(numbers, code_bits, scale_bits, block, ranks)`` is the bytes that a rank's reduce-scatter sends."""
    for case in ((1 << 20, 8, 8, 32, 4), (1 << 20, 4, 8, 16, 8), (1 << 22, 8, 32, 128, 2)):
        numbers, code, scale, block, ranks = case
        answer, expected = call(function, *case), formulas.half_bytes(
            numbers, formulas.bits_a_number(code, scale, block), ranks
        )  # fmt: skip
        where = f"{numbers:,} numbers of {code} bits, a scale of {scale} bits for {block}, {ranks} ranks:"
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            raise Mistake(f"{where} it returned {type(answer).__name__}, not a number of bytes.")
        if math.isclose(answer, expected, rel_tol=1e-6):
            continue
        for wrong, hint in (
            (formulas.half_bytes(numbers, code, ranks), "the scales travel, too"),
            (8 * expected, "these are bits"),
            (2 * expected, "that is an all-reduce"),
            (expected * ranks / (ranks - 1), "a rank keeps its own part, and sends (N−1)/N"),
            (formulas.half_bytes(numbers, code + scale, ranks), "a scale serves a whole block"),
        ):
            if math.isclose(answer, wrong, rel_tol=1e-6):
                raise Mistake(f"{where} a rank sends {expected:,.0f} bytes, not {answer:,.0f}: {hint}.")
        raise Mistake(f"{where} a rank sends {expected:,.0f} bytes, not {answer:,.0f}.")
    return "Right: 8.25 bits a number for MXFP8 and 4.5 for NVFP4, and (N−1)/N of them."


def check_block(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """``function(block)`` is 32 numbers as they come back from MXFP8."""
    seed = fresh_seed()
    cut_off = torch.full((32,), 0.75)
    cut_off[0] = 500.0  # between 448 and 512: the block's scale is 1, and this is cut off
    for block in (gpt.numbers(32, seed=seed) * 3e-4, gpt.numbers(32, seed=seed + 1) * 90, cut_off):
        answer = call(function, block.clone())
        if not isinstance(answer, torch.Tensor) or answer.shape != block.shape:
            raise Mistake("It should return the 32 numbers as a tensor.")
        answer, right = answer.float(), rounded(block, "mxfp8")
        if torch.equal(answer, right):
            continue
        if answer.isnan().any():
            raise Mistake("There are NaNs: after the division the largest may lie above 448, and has to be cut off.")
        if torch.equal(answer, block):
            raise Mistake("These are the numbers as they came: nothing was rounded.")
        if torch.allclose(answer, rounded(block, "e4m3"), rtol=1e-5):
            raise Mistake("Nearly: this scale is largest/448. MXFP8 stores a scale in one byte, as a power of two.")
        raise Mistake(f"For a block whose largest is {float(block.abs().max()):.4g}, these are not MXFP8's numbers: "
                      "the scale is 2 to the power of ⌊log₂ largest⌋ − 8.")  # fmt: skip
    return "Right: a power of two as the scale, E4M3's numbers, and what is above 448 cut off."


def my_largest(exponent, fraction):
    bias = 2 ** (exponent - 1) - 1
    power = 2**exponent - 1 - bias  # an exponent of ones only
    # The largest fraction means NaN; the one below it is the largest number's.
    return (2 - 2 * 2**-fraction) * 2**power


def my_sent(numbers, code_bits, scale_bits, block, ranks):
    bits = code_bits + scale_bits / block  # a scale serves its whole block
    return (ranks - 1) / ranks * numbers * bits / 8


def my_mxfp8(block):
    # E4M3's largest number, 448, lies between 2⁸ and 2⁹.
    power = torch.frexp(block.abs().max()).exponent - 1 - 8
    scale = torch.ldexp(torch.ones(()), power)
    codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float() * scale
