"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable
from numbers import Real

from pardemo.book.page.exercises import Exercise, Mistake, call
from pardemo.formulas import memory

EXERCISES = {
    "bytes": Exercise(
        "my_bytes",
        "There are three kinds of model states. ZeRO-1 shards the largest of them, ZeRO-2 one more, ZeRO-3 all three.",
    ),
    "stage": Exercise(
        "my_stage",
        "Tensor parallelism leaves a rank fewer parameters, and fewer ranks to share them with. With that, ask your "
        "function from the exercise before, one ZeRO stage after the other.",
    ),
}


def check_bytes(function: Callable[[int, int, int, int], float]) -> str:
    """``function(params, n, stage, k)`` is the bytes of model states on a rank."""
    for params, n, stage, k in (
        (100, 4, 0, 12),
        (7_500_000_000, 64, 1, 12),
        (64, 4, 2, 12),
        (64, 4, 3, 12),
        (64, 8, 2, 6),
    ):
        answer = call(function, params, n, stage, k)
        expected = memory.model_states_bytes(params, n, stage, memory.StateBytes(optimizer=k))
        if isinstance(answer, Real) and abs(answer - expected) <= 1e-6 * expected:
            continue
        where = (
            f"For {params} parameters on {n} ranks, ZeRO stage {stage}, K = {k}: {expected:,.0f} bytes, not {answer!r}."
        )
        if isinstance(answer, Real) and stage == 2 and abs(answer - memory.model_states_bytes(
            params, n, 1, memory.StateBytes(optimizer=k))) < 1:  # fmt: skip
            raise Mistake(f"{where} ZeRO-2 shards the gradients, too.")
        raise Mistake(f"{where} 2Ψ of parameters, 2Ψ of gradients, KΨ of optimizer states: which are divided by N?")
    return "2Ψ + 2Ψ + KΨ: ZeRO-1 divides the last term by N, ZeRO-2 the gradients as well, ZeRO-3 all of them."


def check_stage(function: Callable[[int, int, int, float], int | None]) -> str:
    """``function(params, gpus, tp, memory_bytes)`` is the smallest ZeRO stage that fits, or None."""
    cases = (
        (10**9, 8, 1, 80e9), (13 * 10**9, 8, 1, 80e9), (13 * 10**9, 8, 1, 64e9), (13 * 10**9, 8, 1, 32e9),
        (13 * 10**9, 8, 1, 16e9), (30 * 10**9, 16, 4, 40e9), (30 * 10**9, 16, 16, 40e9),
    )  # fmt: skip
    for params, gpus, tp, room in cases:
        fits = [s for s in memory.STAGES if memory.model_states_bytes(params // tp, gpus // tp, s) <= room]
        expected = fits[0] if fits else None
        answer = call(function, params, gpus, tp, room)
        if answer is expected or (_is_number(answer) and answer == expected):
            continue
        where = f"{params / 1e9:g}B on {gpus} GPUs, tp {tp}, {room / 1e9:g} GB"
        if tp > 1:
            raise Mistake(
                f"{where}: ZeRO stage {expected}, not {answer!r}. "
                "A rank holds 1/tp of the parameters, and N is gpus/tp."
            )
        raise Mistake(
            f"{where}: ZeRO stage {expected}, not {answer!r}. The smallest one that fits, None if even ZeRO-3 does not."
        )
    return "The smallest ZeRO stage that fits; higher ones send more as soon as there are several micro-batches."


def _is_number(answer: object) -> bool:
    return isinstance(answer, Real) and not isinstance(answer, bool)


def my_bytes(params, n, stage, k):
    parameters, gradients, states = 2 * params, 2 * params, k * params
    # Each ZeRO stage shards one kind more; every rank keeps the others whole.
    if stage >= 1:
        states = states / n
    if stage >= 2:
        gradients = gradients / n
    if stage >= 3:
        parameters = parameters / n
    return parameters + gradients + states


def my_stage(params, gpus, tp, memory_bytes):
    for stage in range(4):  # the first that fits sends the least
        if my_bytes(params // tp, gpus // tp, stage, 12) <= memory_bytes:
            return stage
    return None
