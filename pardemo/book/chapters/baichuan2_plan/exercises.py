"""The exercises of this chapter, and what checks an answer to each."""

import math
from collections.abc import Callable, Iterator
from numbers import Real

from pardemo.book.page.exercises import Exercise, Mistake, call
from pardemo.formulas import memory

EXERCISES = {
    "lora_states": Exercise(
        "my_lora_states",
        "Count the three kinds one by one: which parameters have a gradient, which have optimizer states? Then ask of "
        "each kind from which of ZeRO's stages on it is shared out.",
    ),
    "steps": Exercise(
        "my_steps",
        "Follow one epoch: how many batches, how many of them on each GPU, how many accumulations? What is left over "
        "at each of these still counts as one.",
    ),
}

#: frozen, trained, ranks, stage
_JOBS = ((1000, 8, 1, 0), (1000, 8, 4, 1), (1000, 8, 4, 2), (1000, 8, 4, 3), (0, 64, 8, 3), (512, 96, 2, 2))
_EXACT = 1e-9  # an answer is bytes: rounding aside it is right or not


def check_lora_states(function: Callable[[int, int, int, int], float]) -> str:
    """``function(frozen, trained, n, stage)`` is the bytes of a rank's model states under LoRA, K = 12."""
    for job in _JOBS:
        frozen, trained, n, stage = job
        expected = _bytes(*job)
        answer = call(function, *job)
        where = f"{frozen} frozen and {trained} trained parameters on {n} ranks, ZeRO-{stage}: {expected:g} B"
        where += f", not {answer!r}."
        if not isinstance(answer, Real) or isinstance(answer, bool):
            raise Mistake(f"{where} It should return a number of bytes.")
        if abs(answer - expected) <= _EXACT * expected:
            continue
        hints = (hint for hint, wrong in _wrong(*job) if abs(answer - wrong) <= _EXACT * abs(wrong))
        general = "Frozen: 2 bytes each. Trained: 2 + 2 + 12. Which ZeRO stage divides which by N?"
        raise Mistake(f"{where} {next(hints, general)}")
    return "Frozen parameters are 2 bytes each, and only ZeRO-3 shares them out."


def _bytes(frozen: int, trained: int, n: int, stage: int) -> float:
    return memory.model_states_bytes(trained, n, stage) + 2 * frozen / (n if stage == 3 else 1)


def _wrong(frozen: int, trained: int, n: int, stage: int) -> Iterator[tuple[str, float]]:
    """What people answer, and what is wrong with it."""
    right, share = _bytes(frozen, trained, n, stage), n if stage == 3 else 1
    gradients, states = (kind * trained / (n if stage >= since else 1) for kind, since in ((2, 2), (12, 1)))
    all_trained = memory.model_states_bytes(frozen + trained, n, stage)
    yield "Frozen parameters have neither gradients nor optimizer states.", all_trained
    yield "ZeRO-3 shares out the frozen parameters too.", right + 2 * frozen * (1 - 1 / share)
    yield "Frozen parameters are in memory as well, 2 bytes each.", right - 2 * frozen / share
    yield "The trained ones have gradients and optimizer states besides.", 2 * (frozen + trained) / share
    yield "The trained ones' gradients are missing, 2 bytes each.", right - gradients
    yield "The trained ones' optimizer states are missing, 12 bytes each.", right - states
    yield "Optimizer states are shared out from ZeRO-1 on.", right - states + 12 * trained
    yield "Gradients are shared out from ZeRO-2 on, not before.", right - gradients + 2 * trained
    yield "Gradients are shared out from ZeRO-2 on, not before.", right - gradients + 2 * trained / n
    for shared in (frozen, frozen + trained):
        yield "Parameters are shared out by ZeRO-3 alone.", right - 2 * shared * (1 / share - 1 / n)


def check_steps(function: Callable[[int, int, int, int, int], int]) -> str:
    """``function(samples, gpus, batch, accumulation, epochs)`` counts a run's steps, partial ones kept."""
    for samples, gpus, batch, accumulation, epochs in (
        (80_000, 8, 8, 4, 5), (80_000, 8, 8, 1, 5), (1000, 1, 8, 4, 1), (64, 8, 8, 4, 2), (81_920, 8, 8, 4, 5)
    ):  # fmt: skip
        batches = math.ceil(math.ceil(samples / batch) / gpus)
        expected = epochs * math.ceil(batches / accumulation)
        answer = call(function, samples, gpus, batch, accumulation, epochs)
        number = isinstance(answer, Real) and not isinstance(answer, bool)
        if number and answer == expected:
            continue
        hint = "what is left of each epoch after whole accumulations is a step too"
        if number and answer == epochs * (batches // accumulation):
            hint = "that drops the partial step of each epoch: " + hint
        where = f"{samples:,} samples, {gpus} × {batch} × {accumulation}, {epochs} epochs: {expected:,} steps"
        raise Mistake(f"{where}, not {answer!r}; {hint}.")
    return "The job of this chapter takes 1,565 steps with today's Trainer."


def my_lora_states(frozen, trained, n, stage):
    parameters = 2 * (frozen + trained)
    gradients, states = 2 * trained, 12 * trained  # what is frozen has neither
    if stage >= 1:
        states = states / n
    if stage >= 2:
        gradients = gradients / n
    if stage >= 3:
        parameters = parameters / n
    return parameters + gradients + states


def my_steps(samples, gpus, batch, accumulation, epochs):
    batches = math.ceil(samples / batch)
    on_each = math.ceil(batches / gpus)
    return epochs * math.ceil(on_each / accumulation)  # each epoch has its own last, partial step
