"""Checkers of notebook 07."""

from collections.abc import Callable
from numbers import Real

import torch
import torch.distributed as dist

from pardemo.collection.exercises import Mistake, call, fresh_seed
from pardemo.formulas import communication
from pardemo.meters import CallMeter, WireMeter
from pardemo.peers import gpt
from pardemo.world import World

RANKS = 4
TIMEOUT_S = 30
NUMEL = 1 << 20


def check_zero1_step(function: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> str:
    """``function(parameters, gradient, lr)`` is one step of gradient descent with the mean gradient, for 2Ψ(N−1)/N."""
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        results = world.run(_try_step, function, fresh_seed())
    for rank, (problem, *_) in enumerate(results):
        if problem:
            raise Mistake(f"On rank {rank} {problem}")
    unit = communication.ring_half(4 * NUMEL, RANKS).sent
    sent = max(sent for _, sent, _ in results) / unit
    if sent > 2.04:
        raise Mistake(
            f"Right, but a rank sends {sent:.1f}Ψ(N−1)/N, and 2 are enough: reduce-scatter the gradient, update this "
            "rank's chunk, all-gather the parameters."
        )
    if any("all_reduce" in calls for *_, calls in results):
        raise Mistake(
            "Right, and no more bytes than needed, but after an all-reduce every rank updates everything: that is data "
            "parallelism. Reduce-scatter, update one chunk, all-gather."
        )
    return f"Right, with {sent:.2f}Ψ(N−1)/N: as much as an all-reduce, and each rank updated a quarter."


def _try_step(function: Callable, seed: int) -> tuple[str, int, dict]:
    size = dist.get_world_size()
    parameters = gpt.numbers(NUMEL, seed=seed)
    gradients = [gpt.numbers(NUMEL, seed=seed + 1 + rank) for rank in range(size)]
    expected = parameters - 0.5 * sum(gradients) / size
    dist.barrier()
    with WireMeter() as wire, CallMeter() as calls:
        found = function(parameters.clone(), gradients[dist.get_rank()].clone(), 0.5)
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        return f"it should return the parameters, shape {tuple(expected.shape)}, not {got}.", 0, {}
    found = found.detach().to(expected.dtype)
    if torch.allclose(found, expected, atol=1e-5):
        return "", wire.sent_bytes, calls.counts
    if torch.allclose(found, parameters - 0.5 * sum(gradients), atol=1e-4):
        return "that is a step with the sum of the gradients; the mean is asked for.", 0, {}
    right = torch.isclose(found, expected, atol=1e-5).float().mean().item()
    return f"only {right:.0%} of the parameters are right.", 0, {}


def check_psi(function: Callable[[int, int], float]) -> str:
    """``function(stage, micro_batches)`` is the traffic of a step in units of Ψ(N−1)/N."""
    for stage in (0, 1, 2, 3):
        for micro_batches in (1, 2, 4):
            found = call(function, stage, micro_batches)
            expected = communication.zero_step(1, 2, stage, micro_batches, element_bytes=2)
            if isinstance(found, Real) and not isinstance(found, bool) and found == expected:
                continue
            hints = {
                0: "gradients are summed once a step, by an all-reduce",
                1: "gradients wait, whole, for the end of the step",
                2: "a gradient shard has no room for a whole one: each micro-batch is reduced; one gather at the end",
                3: "each micro-batch gathers for its forward, for its backward, and reduces",
            }
            raise Mistake(f"Stage {stage} with {micro_batches} micro-batches is not {found!r}: {hints[stage]}.")
    return "Stage 3 pays for every micro-batch; stages 0 and 1 do not."
