"""Checkers of notebook 10."""

import math
from collections.abc import Callable
from numbers import Real

from pardemo.exercises import Mistake, call
from pardemo.formulas import memory


def check_lora_states(function: Callable[[int, int, int, int], float]) -> str:
    """``function(frozen, trained, n, stage)`` is the bytes of a rank's model states under LoRA, K = 12."""
    for frozen, trained, n, stage in (
        (1000, 8, 1, 0),
        (1000, 8, 4, 1),
        (1000, 8, 4, 2),
        (1000, 8, 4, 3),
        (0, 64, 8, 3),
    ):
        expected = memory.model_states_bytes(trained, n, stage) + 2 * frozen / (n if stage == 3 else 1)
        found = call(function, frozen, trained, n, stage)
        if isinstance(found, Real) and abs(found - expected) < 1e-6 * expected:
            continue
        where = f"{frozen} frozen and {trained} trained parameters on {n} ranks, stage {stage}: {expected:g} B"
        where += f", not {found!r}."
        if isinstance(found, Real) and abs(found - memory.model_states_bytes(frozen + trained, n, stage)) < 1:
            raise Mistake(f"{where} Frozen parameters have neither gradients nor optimizer states.")
        raise Mistake(f"{where} Frozen: 2 bytes each. Which stage divides parameters by N?")
    return "Frozen parameters are 2 bytes each, and only stage 3 shares them out."


def check_steps(function: Callable[[int, int, int, int, int], int]) -> str:
    """``function(samples, gpus, batch, accumulation, epochs)`` counts a run's steps, partial ones kept."""
    for samples, gpus, batch, accumulation, epochs in (
        (80_000, 8, 8, 4, 5), (80_000, 8, 8, 1, 5), (1000, 1, 8, 4, 1), (64, 8, 8, 4, 2), (81_920, 8, 8, 4, 5)
    ):  # fmt: skip
        batches = math.ceil(math.ceil(samples / batch) / gpus)
        expected = epochs * math.ceil(batches / accumulation)
        found = call(function, samples, gpus, batch, accumulation, epochs)
        if found == expected and not isinstance(found, bool):
            continue
        hint = "what is left of each epoch after whole accumulations is a step too"
        if found == epochs * (batches // accumulation):
            hint = "that drops the partial step of each epoch: " + hint
        told = f"{samples:,} samples, {gpus} × {batch} × {accumulation}, {epochs} epochs: {expected:,} steps"
        raise Mistake(f"{told}, not {found!r}; {hint}.")
    return "1,565 for the article's job, where today's Trainer runs it."
