"""One way to solve each exercise of this chapter."""

import torch


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
