"""The exercises of this chapter, and what checks an answer to each."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import Mistake, compare_tensors, exercise, formula, fresh_seed, on_ranks
from pardemo.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pardemo.formulas import communication
from pardemo.meters import CallMeter, WireMeter
from pardemo.small_models import gpt

RANKS = 4
NUMEL = 1 << 20
LR = 0.5


def check_clipped_step(function: Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]) -> str:
    """``function(parameters, gradient, lr, max_norm)`` is a clipped step with the mean gradient, for 2Ψ(N−1)/N."""
    measured = on_ranks(RANKS, _try_steps, function, fresh_seed())
    sent = max(nbytes for nbytes, _ in measured) / communication.ring_half(4 * NUMEL, RANKS).sent
    if sent > 2.04:
        raise Mistake(
            f"Right, but a rank sends {sent:.1f}Ψ(N−1)/N, and 2 are enough: reduce-scatter the gradient, update this "
            "rank's chunk, all-gather the parameters. For the norm, one number from each rank will do."
        )
    if any("all_reduce" in calls and "all_gather" not in calls for _, calls in measured):
        raise Mistake(
            "Right, and no more bytes than needed, but after an all-reduce every rank updates everything: that is data "
            "parallelism. Reduce-scatter, update one chunk, all-gather."
        )
    return f"Right, with {sent:.2f}Ψ(N−1)/N: clipped by the norm of a gradient that no rank has seen whole."


def _try_steps(function: Callable, seed: int) -> str | tuple[int, dict]:
    """A step that has to be clipped, measured, and one that has not: bytes sent, and calls of each collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = gpt.numbers(NUMEL, seed=seed)
    gradients = [(1 + r) * gpt.numbers(NUMEL, seed=seed + 1 + r) for r in range(size)]  # chunks of unequal norms, too
    for number, gradient in enumerate(gradients):
        gradient[: NUMEL // size] *= 1 + number
    mean = sum(gradients) / size
    norm = mean.norm().item()
    dist.barrier()
    with WireMeter() as wire, CallMeter() as calls:
        updated = function(parameters.clone(), gradients[rank].clone(), LR, norm / 10)
    mistakes = [
        (
            parameters - LR * mean,
            "that is the step with the mean gradient, but its norm is above max_norm: it has to be scaled down.",
        ),
        (
            parameters - LR * sum(gradients),
            "that is a step with the sum of the gradients; the mean is asked for, clipped.",
        ),
    ]
    otherwise = _scaled((parameters - updated) / LR, mean) if isinstance(updated, torch.Tensor) else ""
    if problem := compare_tensors(updated, parameters - LR * mean / 10, mistakes, otherwise, atol=1e-4):
        return problem
    again = function(parameters.clone(), gradients[rank].clone(), LR, 2 * norm)
    if not torch.allclose(again, parameters - LR * mean, atol=1e-4):
        return "a gradient whose norm is below max_norm should stay as it is: only longer ones are scaled."
    return wire.sent_bytes, calls.counts


def _scaled(step: torch.Tensor, mean: torch.Tensor) -> str:
    """What is wrong with a step that ought to be a tenth of the mean gradient."""
    chunks = list(zip(step.chunk(RANKS), mean.chunk(RANKS), strict=True))
    factors = [float((s * m).sum() / (m * m).sum()) for s, m in chunks]
    along = all(torch.allclose(s, k * m, atol=1e-3) for k, (s, m) in zip(factors, chunks, strict=True))
    if not along or min(factors) <= 0:
        return "this is not the step with the clipped mean gradient"
    if max(factors) > 1.01 * min(factors):
        return (
            "the chunks are scaled by different factors: each rank took the norm of its own chunk. The norm is that of "
            "the whole gradient, the root of the sum of all ranks' squares"
        )
    return f"the mean gradient is scaled by {factors[0]:.3g} instead of 0.1: of what did you take the norm?"


@formula(
    list(itertools.product((0, 1, 2, 3), (1, 2, 4))),
    "ZeRO-3 pays for every micro-batch; data parallelism and ZeRO-1 pay once a step.",
)
def check_psi(stage: int, micro_batches: int):
    """The traffic of a step in units of Ψ(N−1)/N."""
    hints = (
        "plain data parallelism sums gradients once a step, by an all-reduce",
        "gradients wait, whole, for the end of the step",
        "a gradient shard has no room for a whole one: each micro-batch is reduced; one gather at the end",
        "each micro-batch gathers for its forward, for its backward, and reduces",
    )
    return communication.zero_step(1, 2, stage, micro_batches, element_bytes=2), [(lambda _: True, hints[stage])]


@exercise("clipped_step")
def my_step(parameters, gradient, lr, max_norm):
    """After the reduce-scatter each rank has its own chunk of the mean gradient. The norm's square is a sum of
    squares, so which single number does each rank have to add to the others' before it scales its chunk?"""
    rank, n = dist.get_rank(), dist.get_world_size()
    mean = ring_reduce_scatter(gradient) / n  # of this rank's chunk, and of no other
    squares = mean.square().sum()
    ring_all_reduce(squares)  # one number: the squares of all chunks
    factor = min(1.0, max_norm / squares.sqrt().item())
    chunk = parameters.chunk(n)[rank] - lr * factor * mean
    return ring_all_gather(chunk)  # new parameters travel in the place of gradients


@exercise("psi")
def my_psi(stage, micro_batches):
    """Count reduce-scatters and all-gathers: each is one Ψ(N−1)/N. Which come once a step, and which with every
    micro-batch, because a rank has no room for the whole?"""
    if stage in (0, 1):
        return 2  # whole gradients wait for the end of the step: one all-reduce, or its two halves
    if stage == 2:
        return micro_batches + 1  # each micro-batch is reduced; parameters are gathered once
    return 3 * micro_batches  # each gathers for its forward, for its backward, and is reduced
