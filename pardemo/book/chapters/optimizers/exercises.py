"""The exercises of this chapter, and what checks an answer to each."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import Mistake, compare_tensors, exercise, formula, fresh_seed, on_ranks
from pardemo.formulas import optimizers as formulas
from pardemo.meters import CallMeter
from pardemo.small_models import gpt

RANKS = 2
ROWS, COLUMNS = 24, 64
#: A model's parameters: name and shape.
MODELS = (
    [("layers.0.qkv", (96, 32)), ("layers.0.norm", (32,))],
    [("embedding", (1000, 32)), ("layers.0.up", (128, 32)), ("layers.0.up.bias", (128,)), ("head", (1000, 32))],
)


@formula(
    [(model,) for model in MODELS],
    "Right: 4 bytes of master weights for each parameter, and 4 of Muon's or 8 of Adam's.",
    unit="bytes",
)
def check_states(parameters: list[tuple[str, tuple[int, ...]]]):
    """The bytes that Muon, with Adam for the rest, keeps in mixed precision."""

    def states(for_muon: Callable[[str, tuple[int, ...]], bool]) -> int:
        return sum(formulas.KEPT["Muon" if for_muon(*shape) else "Adam"](shape[1]) for shape in parameters)

    masters = 4 * sum(math.prod(shape) for _, shape in parameters)
    right = masters + states(lambda name, shape: len(shape) == 2 and name not in ("embedding", "head"))
    return right, [
        (right - masters, "mixed precision keeps an fp32 copy of every parameter, too"),
        (masters + states(lambda *_: False), "with that, Adam has everything"),
        (masters + states(lambda *_: True), "vectors go to Adam, and embedding and head, too"),
        (
            masters + states(lambda _, shape: len(shape) == 2),
            "embedding and head are matrices, but their rows are looked up and not multiplied: they go to Adam",
        ),
    ]


def check_by_columns(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """``function(part)`` is this rank's columns of the orthogonalised matrix, whose columns the ranks share."""
    if gathers := max(on_ranks(RANKS, _try_columns, function, fresh_seed())):
        raise Mistake(
            f"Right, but {gathers} all-gathers bring the columns of all ranks to each: sum the product x xᵀ, which is "
            "smaller, and each rank keeps its columns."
        )
    return "Right, and no rank ever has the whole matrix: the ranks sum one small square a round."


def _try_columns(function: Callable, seed: int) -> str | int:
    """How many all-gathers this rank called."""
    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = gpt.numbers(ROWS, COLUMNS, seed=seed)
    parts = matrix.chunk(size, 1)
    dist.barrier()
    with CallMeter() as calls:
        result = function(parts[rank].clone())
    right = _iterated(matrix / matrix.norm()).chunk(size, 1)[rank]
    if not isinstance(result, torch.Tensor) or result.shape != right.shape:
        return compare_tensors(result, right)
    by_own_norms = _iterated(torch.cat([part / part.norm() for part in parts], 1)).chunk(size, 1)[rank]
    for candidate, problem in (
        (right, calls.counts.get("all_gather", 0)),
        (_iterated(parts[rank] / parts[rank].norm()), "it is orthogonalised without the other ranks' columns."),
        (by_own_norms, "x xᵀ is summed, but each rank divided by the norm of its own columns."),
    ):
        if gpt.relative_error(result.float(), candidate) < 0.06:  # bf16 is off by 0.02 at most; wrong norms by 0.28
            return problem
    return "these are not the columns of the orthogonalised matrix (five rounds, in fp32 or bf16)."


def _iterated(x: torch.Tensor) -> torch.Tensor:
    """In fp32."""
    from pardemo.optimizers.muon import COEFFICIENTS, ROUNDS

    first, third, fifth = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = first * x + (third * gram + fifth * gram @ gram) @ x
    return x


@formula(
    [(*size, way) for size in ((512, 4), (4096, 8)) for way in ("by products", "gathered", "owner")],
    "Right: fifteen gathers, one gather, or one N-th of a gather and as much back.",
    unit="bytes",
)
def check_sent(width: int, ranks: int, way: str):
    """The bytes that a rank sends for a square matrix of that width in 16 bits."""
    share = (ranks - 1) / ranks
    right = {
        "by products": 2 * formulas.muon_dtensor(width, width, ranks),
        "gathered": 2 * share * width**2,
        "owner": 2 * formulas.muon_owned(width**2, ranks),
    }[way]
    return right, [
        (right / 2, "a number in 16 bits is 2 bytes"),
        (right / share, "a rank does not send to itself what it has"),
        (right / 5, "there are five rounds"),
        (right / 15, "there are fifteen products"),
        (right / 3, "each round has three products"),
        (right * ranks, "that is what all ranks send together, or what one owner sends for all"),
        (right * ranks / 2, "only the owner gathers a matrix, and only it sends the update back"),
    ]


@exercise("states")
def my_states(parameters):
    """Ask three things of each parameter: is it a matrix, is it an embedding or the output head, and what does every
    parameter have in fp32 beside its 16 bits?"""
    total = 0
    for name, shape in parameters:
        with_muon = len(shape) == 2 and name not in ("embedding", "head")
        total += (4 + (4 if with_muon else 8)) * math.prod(shape)  # 4: the fp32 copy
    return total


@exercise("by_columns")
def my_orthogonalised(part):
    """x times xᵀ adds over the columns, so what each rank computes of it is one part of a sum. What else in the
    iteration looks at all columns?"""
    squares = (part**2).sum()
    dist.all_reduce(squares)  # the norm of the whole matrix
    x = part / squares.sqrt()
    for _ in range(5):
        gram = x @ x.T
        dist.all_reduce(gram)  # a sum over all columns
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@exercise("sent")
def my_sent(width, ranks, way):
    """Count what one gather of a matrix sends from a rank, and how many gathers there are. On its owner only one
    rank receives the rows, and only one sends them back."""
    gather = 2 * (ranks - 1) / ranks * width**2  # bytes that a rank sends
    if way == "by products":
        return 15 * gather
    return gather if way == "gathered" else 2 * gather / ranks
