"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import low_precision
from pardemo.planner import hardware


@problem("times")
def _reach_of_e5m2():
    """E4M3 gives one code to NaN, and E5M2 the four codes of its last exponent to infinity and NaN. How many times as
    large as E4M3's is the largest number of E5M2?"""
    ratio = low_precision.largest(5, 2, 4) / low_precision.largest(4, 3, 1)
    return ratio, f"""E5M2 reaches {low_precision.largest(5, 2, 4):,.0f} and E4M3 {low_precision.largest(4, 3, 1):g}:
        {ratio:g} times as far. It pays with a bit of the fraction, so its rounding is twice as coarse."""  # fmt: skip


@problem("GB")
def _bytes_of_a_model():
    """How much do the weights of a model of 70 billion parameters take in NVFP4, with an 8-bit scale for each block of
    16?"""
    bits = low_precision.bits_a_number(4, 8, 16)
    gigabytes = 70e9 * bits / 8 / 1e9
    return gigabytes, f"""Sixteen codes of 4 bits share a scale of 8, so a number takes 4 + 8/16 = {bits:g} bits. 70
        billion of them are {gigabytes:.4g} GB, beside {2 * 70:g} GB in bf16."""  # fmt: skip


@problem()
def _counter_in_bf16():
    """You count tokens by adding 1.0 to a bf16 number, again and again. At which number does it stop growing?"""
    stands = low_precision.sum_stands_still(7)
    return stands, f"""bf16 has 7 bits of fraction. At {stands:g} its numbers are 2 apart, so {stands + 1:g} lies in the
        middle and the tie goes back to the even one: the sum stays at {stands:g}, however many follow."""  # fmt: skip


@problem("s")
def _gradients_at_one_gigabit():
    """Eight ranks average 100 million gradients over links of 1 Gbit/s, by a reduce-scatter and an all-gather. How many
    seconds does a step save with MXFP8 codes (8 bits, a scale of 8 for each 32) in place of fp32?"""
    numbers, ranks, rate = 100e6, 8, 1e9 / 8
    plain = 2 * low_precision.half_bytes(numbers, 32, ranks) / rate
    codes = 2 * low_precision.half_bytes(numbers, low_precision.bits_a_number(8, 8, 32), ranks) / rate
    return plain - codes, f"""Both halves of the all-reduce send 7/8 of the numbers. In fp32 that takes {plain:.1f} s at
        1 Gbit/s. In MXFP8 a number has {low_precision.bits_a_number(8, 8, 32):g} bits, so it takes {codes:.1f} s:
        {plain - codes:.2f} s less."""  # fmt: skip


@problem("times")
def _share_of_products():
    """On an H100 matrix multiplications take 70 % of a bf16 step. They all change to FP8 and reach the data sheet's
    ratio, and nothing else changes. How many times as quick is the step?"""
    gpu = hardware.gpu("H100")
    quicker = hardware.peak_flops(gpu, "fp8") / gpu.flops
    step = 0.7 / quicker + 0.3
    return 1 / step, f"""On the data sheet FP8 is {quicker:.3g} times as quick as bf16. Seven tenths of the step become
        {0.7 / quicker:.3f}, and three tenths stay 0.3: together {step:.3f}, so it is {1 / step:.2f} times as quick.
        What does not multiply decides."""  # fmt: skip
