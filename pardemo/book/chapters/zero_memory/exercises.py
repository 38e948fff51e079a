"""The exercises of this chapter, and what checks an answer to each."""

from pardemo.book.page.exercises import exercise, formula
from pardemo.formulas import memory


@formula(
    ((100, 4, 0, 12), (7_500_000_000, 64, 1, 12), (64, 4, 2, 12), (64, 4, 3, 12), (64, 8, 2, 6)),
    "2Ψ + 2Ψ + KΨ: ZeRO-1 divides the last term by N, ZeRO-2 the gradients as well, ZeRO-3 all of them.",
    unit="bytes",
)
def check_bytes(params: int, n: int, stage: int, k: int):
    """The bytes of model states on a rank."""
    right, of_zero1 = (
        memory.model_states_bytes(params, n, cut, memory.StateBytes(optimizer=k)) for cut in (stage, min(stage, 1))
    )
    return right, [
        (lambda answer: stage == 2 and abs(answer - of_zero1) < 1, "ZeRO-2 shards the gradients, too"),
        (lambda _: True, "2Ψ of parameters, 2Ψ of gradients, KΨ of optimizer states: which are divided by N?"),
    ]


_SIZES = (
    (1, 8, 1, 80),
    (13, 8, 1, 80),
    (13, 8, 1, 64),
    (13, 8, 1, 32),
    (13, 8, 1, 16),
    (30, 16, 4, 40),
    (30, 16, 16, 40),
)


@formula(
    [(billions * 10**9, gpus, tp, room * 1e9) for billions, gpus, tp, room in _SIZES],
    "The smallest ZeRO stage that fits; higher ones send more as soon as there are several micro-batches.",
    asked="a ZeRO stage",
)
def check_stage(params: int, gpus: int, tp: int, memory_bytes: float):
    """The smallest ZeRO stage that fits, or None."""
    held = {stage: memory.model_states_bytes(params // tp, gpus // tp, stage) for stage in memory.STAGES}
    return next((stage for stage, nbytes in held.items() if nbytes <= memory_bytes), None), [
        (lambda _: tp > 1, "a rank holds 1/tp of the parameters, and N is gpus/tp"),
        (lambda _: True, "the smallest one that fits, None if even ZeRO-3 does not"),
    ]


@exercise("bytes")
def my_bytes(params, n, stage, k):
    """There are three kinds of model states. ZeRO-1 shards the largest of them, ZeRO-2 one more, ZeRO-3 all three."""
    parameters, gradients, states = 2 * params, 2 * params, k * params
    # Each ZeRO stage shards one kind more; every rank keeps the others whole.
    if stage >= 1:
        states = states / n
    if stage >= 2:
        gradients = gradients / n
    if stage >= 3:
        parameters = parameters / n
    return parameters + gradients + states


@exercise("stage")
def my_stage(params, gpus, tp, memory_bytes):
    """Tensor parallelism leaves a rank fewer parameters, and fewer ranks to share them with. With that, ask your
    function from the exercise before, one ZeRO stage after the other."""
    for stage in range(4):  # the first that fits sends the least
        if my_bytes(params // tp, gpus // tp, stage, 12) <= memory_bytes:
            return stage
    return None
