"""The exercises of this chapter, and what checks an answer to each."""

import math

from pardemo.book.page.exercises import exercise, formula
from pardemo.formulas import memory


@formula(
    ((1000, 8, 1, 0), (1000, 8, 4, 1), (1000, 8, 4, 2), (1000, 8, 4, 3), (0, 64, 8, 3), (512, 96, 2, 2)),
    "Frozen parameters are 2 bytes each, and only ZeRO-3 shares them out.",
    unit="bytes",
    rel=1e-9,
)
def check_lora_states(frozen: int, trained: int, n: int, stage: int):
    """The bytes of a rank's model states under LoRA, K = 12."""
    share = n if stage == 3 else 1
    gradients, states = (kind * trained / (n if stage >= since else 1) for kind, since in ((2, 2), (12, 1)))
    right = memory.model_states_bytes(trained, n, stage) + 2 * frozen / share
    too_early = "gradients are shared out from ZeRO-2 on, not before"
    return right, [
        (
            memory.model_states_bytes(frozen + trained, n, stage),
            "frozen parameters have neither gradients nor optimizer states",
        ),
        (right + 2 * frozen * (1 - 1 / share), "ZeRO-3 shares out the frozen parameters too"),
        (right - 2 * frozen / share, "frozen parameters are in memory as well, 2 bytes each"),
        (2 * (frozen + trained) / share, "the trained ones have gradients and optimizer states besides"),
        (right - gradients, "the trained ones' gradients are missing, 2 bytes each"),
        (right - states, "the trained ones' optimizer states are missing, 12 bytes each"),
        (right - states + 12 * trained, "optimizer states are shared out from ZeRO-1 on"),
        (right - gradients + 2 * trained, too_early),
        (right - gradients + 2 * trained / n, too_early),
        (right - 2 * frozen * (1 / share - 1 / n), "parameters are shared out by ZeRO-3 alone"),
        (right - 2 * (frozen + trained) * (1 / share - 1 / n), "parameters are shared out by ZeRO-3 alone"),
        (lambda _: True, "frozen: 2 bytes each; trained: 2 + 2 + 12. Which ZeRO stage divides which by N?"),
    ]


@formula(
    ((80_000, 8, 8, 4, 5), (80_000, 8, 8, 1, 5), (1000, 1, 8, 4, 1), (64, 8, 8, 4, 2), (81_920, 8, 8, 4, 5)),
    "The job of this chapter takes 1,565 steps with today's Trainer.",
    unit="steps",
)
def check_steps(samples: int, gpus: int, batch: int, accumulation: int, epochs: int):
    """A run's steps, partial ones kept."""
    batches = math.ceil(math.ceil(samples / batch) / gpus)
    rest = "what is left of each epoch after whole accumulations is a step too"
    return epochs * math.ceil(batches / accumulation), [
        (epochs * (batches // accumulation), f"that drops the partial step of each epoch: {rest}"),
        (lambda _: True, rest),
    ]


@exercise("lora_states")
def my_lora_states(frozen, trained, n, stage):
    """Count the three kinds one by one: which parameters have a gradient, which have optimizer states? Then ask of
    each kind from which of ZeRO's stages on it is shared out."""
    parameters = 2 * (frozen + trained)
    gradients, states = 2 * trained, 12 * trained  # what is frozen has neither
    if stage >= 1:
        states = states / n
    if stage >= 2:
        gradients = gradients / n
    if stage >= 3:
        parameters = parameters / n
    return parameters + gradients + states


@exercise("steps")
def my_steps(samples, gpus, batch, accumulation, epochs):
    """Follow one epoch: how many batches, how many of them on each GPU, how many accumulations? What is left over at
    each of these still counts as one."""
    batches = math.ceil(samples / batch)
    on_each = math.ceil(batches / gpus)
    return epochs * math.ceil(on_each / accumulation)  # each epoch has its own last, partial step
