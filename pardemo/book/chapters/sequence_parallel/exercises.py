"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed
from pardemo.formulas import memory
from pardemo.meters import CallMeter
from pardemo.small_models import gpt
from pardemo.world import World

EXERCISES = {
    "norm_gradients": Exercise(
        "my_sum",
        "Each rank's gradient comes from its own tokens, and the loss is a sum over all of them. Several small tensors "
        "become one if you flatten them and lay them side by side.",
    ),
    "activations": Exercise(
        "my_kept",
        "Which of the 34 lie inside attention and MLP, where each rank has its heads and columns, and which outside? "
        "Sequence parallelism cuts those, too.",
    ),
}

TIMEOUT_S = 30
RANKS = 2
SHAPES = ((48,), (48,), (16, 3))  # of gradients that a few replicated parameters may have


def check_norm_gradients(function: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> str:
    """``function(gradients)`` is the sum of each gradient over the ranks, by one collective."""
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        results = world.run(_try_gradients, function, fresh_seed())
    for rank, (problem, _) in enumerate(results):
        if problem:
            raise Mistake(f"On rank {rank} {problem}")
    calls = max(calls for _, calls in results)
    if calls > 1:
        raise Mistake(
            f"Right, in {calls} messages of a few kB each, which cost hardly more than their latency: pack them."
        )
    return "Right, and all of them in one message."


def _try_gradients(function: Callable, seed: int) -> tuple[str, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [
        [gpt.numbers(*shape, seed=seed + 9 * owner + r) for owner in range(size)] for r, shape in enumerate(SHAPES)
    ]
    mine, sums = [part[rank] for part in parts], [sum(part) for part in parts]
    dist.barrier()
    with CallMeter() as calls:
        result = function([part.clone() for part in mine])
    if not isinstance(result, list | tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in result):
        return f"it should return {len(SHAPES)} tensors, not {type(result).__name__}.", 0
    shapes = [tuple(tensor.shape) for tensor in result]
    if shapes != list(SHAPES):
        return f"the shapes should be {list(SHAPES)}, as they came, not {shapes}.", 0
    for candidate, message in (
        (sums, ""),
        (mine, "these are the parts of this rank's own tokens."),
        (
            [total / size for total in sums],
            "these are means. The ranks have parts of one sum here, and not replicas of it.",
        ),
    ):
        if all(torch.allclose(tensor, other, atol=1e-4) for tensor, other in zip(result, candidate, strict=True)):
            return message, sum(calls.counts.values())
    return "they are not the sums over the ranks, each in its place.", 0


def check_activations(function: Callable[[int, int, int, int, int, bool, bool], float]) -> str:
    """``function(batch, sequence, hidden, heads, ranks, in_sequence, flash)`` is the bytes of activations that a rank
    keeps of a block."""
    for b, s, h, a, n in ((1, 2048, 12_288, 96, 8), (4, 4096, 5120, 40, 4)):
        for in_sequence in (False, True):
            for flash in (False, True):
                _check_kept(call(function, b, s, h, a, n, in_sequence, flash), b, s, h, a, n, in_sequence, flash)
    return "Right: 10 + 24/t without, 34/t with sequence parallelism, and 5as/h over t where the scores are kept."


def _check_kept(answer: object, b: int, s: int, h: int, a: int, n: int, in_sequence: bool, flash: bool) -> None:
    unit, core = b * s * h, 0 if flash else 5 * a * s / h
    expected = memory.block_activation_bytes(s, b, h, a, n, in_sequence, "selective" if flash else "none")
    settings = (
        f"{'with' if in_sequence else 'without'} sequence parallelism, {'with' if flash else 'without'} FlashAttention"
    )
    where = f"For b = {b}, s = {s}, h = {h}, {a} heads on {n} ranks, {settings},"
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        raise Mistake(f"{where} it returned {type(answer).__name__}, not a number of bytes.")
    if abs(answer - expected) <= 1e-3 * expected:
        return
    for wrong, hint in (
        (unit * (34 + core) / n, "norms, dropout and the layers' inputs are whole on every rank there"),
        (unit * (10 + 24 / n + core), "heads are cut, so each rank has 1/t of the scores"),
        (unit * (10 + (24 + 5 * a * s / h) / n), "the scores are not kept, or the 10 are cut, too"),
        (unit * (34 + 5 * a * s / h) / n, "FlashAttention keeps no scores"),
        (unit * (34 + core), "nothing is cut in that: where is t?"),
        (expected / 2, "two bytes to a number, and one to a dropout's mask"),
    ):
        if abs(answer - wrong) <= 1e-3 * wrong:
            raise Mistake(f"{where} a block keeps {expected / unit:.4g} sbh, not {answer / unit:.4g}: {hint}.")
    raise Mistake(
        f"{where} a block keeps {expected:,.0f} bytes, which is {expected / unit:.4g} sbh, not {answer:,.0f}."
    )


def my_sum(gradients):
    packed = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(packed)  # one message; several small ones would each cost a latency
    parts = packed.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


def my_kept(batch, sequence, hidden, heads, ranks, in_sequence, flash):
    unit = batch * sequence * hidden
    core = 0 if flash else 5 * heads * sequence / hidden
    # Norms 4, masks 2, inputs of two layers cut by columns 4: whole, unless tokens are cut.
    outside = 10 / ranks if in_sequence else 10
    return unit * (outside + (24 + core) / ranks)
