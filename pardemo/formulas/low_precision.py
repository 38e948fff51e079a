"""Computes range, rounding error and size of numbers in few bits with their scales.

A floating-point format has bits for the exponent and bits for the fraction after the leading 1 (IEEE 754-2019, 3.3).
Sources of the formats: Micikevicius et al. 2022 (arXiv 2209.05433, table 1) for E4M3 and E5M2; OCP Microscaling Formats
1.0 for E2M1 and blocks of 32.
"""

from pardemo.formulas.communication import ring_half


def _check(exponent: int, fraction: int) -> None:
    if exponent < 2 or fraction < 1:
        raise ValueError(f"a format has 2 bits of exponent and 1 of fraction at least, not {exponent} and {fraction}")


def largest(exponent: int, fraction: int, taken: int = 0) -> float:
    """The largest number of a format that has no infinity: its last codes are ``taken`` by NaN (E4M3: one; E2M1: 0).

    A format with IEEE's infinity and NaN gives up all codes of the last exponent, which are 2^fraction.
    """
    _check(exponent, fraction)
    fractions = 1 << fraction
    code = (fractions << exponent) - 1 - taken
    power, rest = divmod(code, fractions)
    return (1 + rest / fractions) * 2.0 ** (power - (2 ** (exponent - 1) - 1))


def smallest(exponent: int, fraction: int) -> float:
    """The smallest number above 0: one step of the subnormal numbers."""
    _check(exponent, fraction)
    return 2.0 ** (2 - 2 ** (exponent - 1) - fraction)


def worst_error(fraction: int) -> float:
    """Largest rounding error, relative to the number itself, while exponents last.

    Half a step above a power of two: 2^−(fraction+1) of 1 + 2^−(fraction+1).
    """
    return 1 / (2 ** (fraction + 1) + 1)


def sum_stands_still(fraction: int) -> float:
    """The value at which a sum of ones stops growing if it is rounded after each of them.

    There a one is half the distance to the next number, and the tie goes back to the even one.
    """
    return 2.0 ** (fraction + 1)


def bits_a_number(code_bits: float, scale_bits: float = 0, block: int = 1) -> float:
    """Bits of a number together with its share of the scale of a block; a tensor's one scale counts as nothing."""
    if block < 1:
        raise ValueError(f"a block has at least one number, not {block}")
    return code_bits + scale_bits / block


def half_bytes(numbers: float, bits: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-gather or a reduce-scatter of ``numbers`` in so many bits: (N−1)/N of them."""
    return ring_half(numbers * bits / 8, ranks).sent
