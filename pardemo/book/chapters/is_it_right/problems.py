"""The problems of this chapter, and the way to each answer."""

from collections.abc import Sequence
from dataclasses import replace

from pardemo.book.page.problems import problem
from pardemo.planner.layouts.configurations import shape_of
from pardemo.planner.layouts.layout import Layout

_FP64 = 8  # bytes


def _factor_and_rest(ours: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """As `pardemo prove` computes them."""
    import torch

    from pardemo.script.compare.pairs import compare_pair

    mine, truth = (torch.tensor(numbers, dtype=torch.float64) for numbers in (ours, right))
    compared = compare_pair("", truth, mine, torch.ones(len(truth), dtype=torch.bool), 0.0, 1e-9, [])
    return compared.factor, compared.rest


@problem("samples")
def _samples_of_the_reference():
    """64 ranks train, and t = 8 of them share each layer. A replica takes 3 micro-batches of b = 4 samples in a step.
    How many samples must a step of the one process have that you compare them with?"""
    layout = Layout(tp=8, dp=64 // 8, micro_batch=4, accumulation=3)
    return layout.batch, f"""Ranks that share a layer get the same samples, so there are d = {layout.gpus}/{layout.tp} =
        {layout.dp} replicas. Each takes 3 · 4 = 12 samples of its own, and all of them together {layout.dp} · 12 =
        {layout.batch}. With another number one process takes another step, and nothing is proven."""  # fmt: skip


@problem()
def _which_number():
    """All gradients are wrong by one factor, and no rest is left. With t = 4, d = 8 and 8 micro-batches the factor is
    1/8, with t = 4, d = 4 and 16 micro-batches it is 1/16. Which factor do you expect with t = 2, d = 16 and 4
    micro-batches?"""
    factor = 1 / Layout(tp=2, dp=16, accumulation=4).accumulation
    return factor, f"""In the first layout d and the micro-batches are both 8, so the factor may be one divided by
        either. In the second d is 4 and N has fallen from 32 to 16, but there are 16 micro-batches: it is one divided
        by these. With 4 micro-batches it is 1/4 = {factor:g}. So look over micro-batches for a loss that is divided
        twice, or for a mean where a sum is meant."""  # fmt: skip


@problem("times")
def _weight_of_a_label():
    """In a step one replica has 400 labels and the other one 100. The script takes the mean of the loss on each, and
    then the mean of both. How many times as much as in one process does a label of the second replica weigh?"""
    times, _ = _factor_and_rest([1 / (2 * 100)], [1 / (400 + 100)])
    first, _ = _factor_and_rest([1 / (2 * 400)], [1 / (400 + 100)])
    return times, f"""In one process each label weighs 1/500. In the mean of two means a label of the second replica
        weighs ½ · 1/100 = 1/200, {times:g} times as much, and one of the first ½ · 1/400, {first:g} times as much.
        There is no one factor for both, and so every gradient has a rest."""  # fmt: skip


@problem("%")
def _rest_by_hand():
    """A parameter has two numbers. Its gradient in one process is g₁ = (3, 4), and on the ranks it is g = (6, 4). How
    large is the rest, in per cent of ‖g‖?"""
    ours, right = (6.0, 4.0), (3.0, 4.0)
    factor, rest = _factor_and_rest(ours, right)
    left = [a - factor * b for a, b in zip(ours, right, strict=True)]
    return 100 * rest, f"""The best factor is g·g₁/(g₁·g₁) = (6 · 3 + 4 · 4)/(3² + 4²) = {factor:g}. It leaves (6, 4) −
        {factor:g} · (3, 4) = ({left[0]:.2f}, −{-left[1]:.2f}), whose length is {sum(x * x for x in left) ** 0.5:.2f}.
        Divided by the length of (6, 4), {52**0.5:.3f}, that is {100 * rest:.1f} %. The first number was added twice,
        which no factor for both explains."""  # fmt: skip


@problem("GB")
def _memory_of_a_proof():
    """For a proof you keep two layers of Llama 3 8B (218.1 million parameters each) and its embedding and head, with h
    = 4,096 and V = 128,256. Parameters, gradients and a copy of both lie on one rank in fp64. How much memory do they
    take?"""
    llama = replace(shape_of("llama3-8b"), layers=2)
    full, small = (4 * _FP64 * replace(llama, vocabulary=v).params / 1e9 for v in (llama.vocabulary, 1024))
    return full, f"""Two layers and two tables of {llama.vocabulary * llama.hidden / 1e6:.1f} million parameters make
        {llama.params / 1e9:.3f} billion. At four times 8 bytes they take {full:.1f} GB. Most of that are the tables:
        with a vocabulary of 1,024 it is {small:.1f} GB, and with a smaller width a laptop does it in seconds. A bug of
        the layout shows all the same."""  # fmt: skip
