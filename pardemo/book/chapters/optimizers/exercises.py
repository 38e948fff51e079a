"""The exercises of this chapter, and what checks an answer to each."""

import math
from collections.abc import Callable
from numbers import Real

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed
from pardemo.formulas import optimizers as formulas
from pardemo.meters import CallMeter
from pardemo.small_models import gpt
from pardemo.world import World

EXERCISES = {
    "states": Exercise(
        "my_states",
        "Ask three things of each parameter: is it a matrix, is it an embedding or the output head, and what does "
        "every parameter have in fp32 beside its 16 bits?",
    ),
    "by_columns": Exercise(
        "my_orthogonalised",
        "x times xᵀ adds over the columns, so what each rank computes of it is one part of a sum. What else in the "
        "iteration looks at all columns?",
    ),
    "sent": Exercise(
        "my_sent",
        "Count what one gather of a matrix sends from a rank, and how many gathers there are. On its owner only one "
        "rank receives the rows, and only one sends them back.",
    ),
}

TIMEOUT_S = 30
RANKS = 2
ROWS, COLUMNS = 24, 64
#: A model's parameters: name, shape, and bytes of states in all, with Muon for what it is for.
MODELS = (
    (("layers.0.qkv", (96, 32)), ("layers.0.norm", (32,))),
    (("embedding", (1000, 32)), ("layers.0.up", (128, 32)), ("layers.0.up.bias", (128,)), ("head", (1000, 32))),
)


def check_states(function: Callable[[list[tuple[str, tuple[int, ...]]]], float]) -> str:
    """``function(parameters)`` is the bytes that Muon, with Adam for the rest, keeps in mixed precision."""
    for model in MODELS:
        answer = call(function, list(model))
        numbers = sum(formulas.KEPT["Muon"](shape) // 4 for _, shape in model)
        expected = 4 * numbers + _states(model, _for_muon)
        if isinstance(answer, Real) and not isinstance(answer, bool) and abs(answer - expected) < 0.5:
            continue
        if isinstance(answer, bool) or not isinstance(answer, Real):
            raise Mistake(f"It should return a number of bytes, not {type(answer).__name__}.")
        for wrong, hint in (
            (expected - 4 * numbers, "mixed precision keeps an fp32 copy of every parameter, too"),
            (4 * numbers + _states(model, lambda name, shape: False), "with that, Adam has everything"),
            (4 * numbers + _states(model, lambda name, shape: True), "vectors go to Adam, and embedding and head, too"),
            (
                4 * numbers + _states(model, lambda name, shape: len(shape) == 2),
                "embedding and head are matrices, but their rows are looked up and not multiplied: they go to Adam",
            ),
        ):
            if abs(answer - wrong) < 0.5:
                raise Mistake(f"For {dict(model)}: {expected:,} bytes, not {answer:,.0f}: {hint}.")
        raise Mistake(f"For {dict(model)}: {expected:,} bytes, not {answer:,.0f}.")
    return "Right: 4 bytes of master weights for each parameter, and 4 of Muon's or 8 of Adam's."


def _for_muon(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name not in ("embedding", "head")


def _states(model: tuple, for_muon: Callable[[str, tuple[int, ...]], bool]) -> int:
    return sum(formulas.KEPT["Muon" if for_muon(*one) else "Adam"](one[1]) for one in model)


def check_by_columns(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """``function(part)`` is this rank's columns of the orthogonalised matrix, whose columns the ranks share."""
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        results = world.run(_try_columns, function, fresh_seed())
    for rank, (problem, _) in enumerate(results):
        if problem:
            raise Mistake(f"On rank {rank} {problem}")
    gathers = max(calls.get("all_gather", 0) for _, calls in results)
    if gathers:
        raise Mistake(
            f"Right, but {gathers} all-gathers bring the columns of all ranks to each: sum the product x xᵀ, which is "
            "smaller, and each rank keeps its columns."
        )
    return "Right, and no rank ever has the whole matrix: the ranks sum one small square a round."


def _try_columns(function: Callable, seed: int) -> tuple[str, dict[str, int]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = gpt.numbers(ROWS, COLUMNS, seed=seed)
    parts = matrix.chunk(size, 1)
    mine = parts[rank].clone()
    dist.barrier()
    with CallMeter() as calls:
        result = function(mine)
    if not isinstance(result, torch.Tensor):
        return f"it should return a tensor, not {type(result).__name__}.", {}
    if result.shape != mine.shape:
        return f"the shape should be {tuple(mine.shape)}, this rank's columns, not {tuple(result.shape)}.", {}
    right = _iterated(matrix).chunk(size, 1)[rank]
    own_norm = _iterated(matrix, by_norms=[part.norm() for part in parts]).chunk(size, 1)[rank]
    for candidate, message in (
        (right, ""),
        (_iterated(parts[rank]), "it is orthogonalised without the other ranks' columns."),
        (own_norm, "x xᵀ is summed, but each rank divided by the norm of its own columns."),
    ):
        if gpt.relative_error(result.float(), candidate) < 0.06:  # bf16 is off by 0.02 at most; wrong norms by 0.28
            return message, calls.counts
    return "these are not the columns of the orthogonalised matrix (five rounds, in fp32 or bf16).", {}


def _iterated(matrix: torch.Tensor, by_norms: list[torch.Tensor] | None = None) -> torch.Tensor:
    """In fp32; ``by_norms``: what the columns of each rank are divided by, in place of the whole norm."""
    from pardemo.optimizers.muon import COEFFICIENTS, ROUNDS

    first, third, fifth = COEFFICIENTS
    if by_norms is None:
        x = matrix / matrix.norm()
    else:
        x = torch.cat([part / norm for part, norm in zip(matrix.chunk(len(by_norms), 1), by_norms, strict=True)], 1)
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = first * x + (third * gram + fifth * gram @ gram) @ x
    return x


def check_sent(function: Callable[[int, int, str], float]) -> str:
    """``function(width, ranks, way)`` is the bytes that a rank sends for a square matrix of that width in 16 bits."""
    for width, ranks in ((512, 4), (4096, 8)):
        numbers, share = width**2, (ranks - 1) / ranks
        expected = {
            "by products": 2 * formulas.muon_dtensor(width, width, ranks),
            "gathered": 2 * share * numbers,
            "owner": 2 * formulas.muon_owned(numbers, ranks),
        }
        for way, right in expected.items():
            answer = call(function, width, ranks, way)
            where = f"For a width of {width:,} on {ranks} ranks, {way!r},"
            if isinstance(answer, bool) or not isinstance(answer, Real):
                raise Mistake(f"{where} it returned {type(answer).__name__}, not a number of bytes.")
            if abs(answer - right) <= 1e-6 * right:
                continue
            for wrong, hint in (
                (right / 2, "a number in 16 bits is 2 bytes"),
                (right / share, "a rank does not send to itself what it has"),
                (right / 5, "there are five rounds"),
                (right / 15, "there are fifteen products"),
                (right / 3, "each round has three products"),
                (right * ranks, "that is what all ranks send together, or what one owner sends for all"),
                (right * ranks / 2, "only the owner gathers a matrix, and only it sends the update back"),
            ):
                if abs(answer - wrong) <= 1e-6 * right:
                    raise Mistake(f"{where} {right:,.0f} bytes, not {answer:,.0f}: {hint}.")
            raise Mistake(f"{where} {right:,.0f} bytes, not {answer:,.0f}.")
    return "Right: fifteen gathers, one gather, or one N-th of a gather and as much back."


def my_states(parameters):
    total = 0
    for name, shape in parameters:
        with_muon = len(shape) == 2 and name not in ("embedding", "head")
        total += (4 + (4 if with_muon else 8)) * math.prod(shape)  # 4: the fp32 copy
    return total


def my_orthogonalised(part):
    squares = (part**2).sum()
    dist.all_reduce(squares)  # the norm of the whole matrix
    x = part / squares.sqrt()
    for _ in range(5):
        gram = x @ x.T
        dist.all_reduce(gram)  # a sum over all columns
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def my_sent(width, ranks, way):
    gather = 2 * (ranks - 1) / ranks * width**2  # bytes that a rank sends
    if way == "by products":
        return 15 * gather
    return gather if way == "gathered" else 2 * gather / ranks
