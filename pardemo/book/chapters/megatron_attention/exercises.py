"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import Mistake, call, compare_tensors, exercise, fresh_seed, on_ranks
from pardemo.small_models import gpt


def check_qkv_rows(function: Callable[[torch.Tensor, int, int, int], torch.Tensor]) -> str:
    """``function(weight, heads, rank, ranks)`` is the rank's rows of query, then of key, then of value."""
    for heads, ranks in ((4, 2), (8, 4), (6, 1)):
        weight = torch.arange(3.0 * heads * 2)[:, None].expand(-1, heads * 2).contiguous()  # row i holds i; heads of 2
        for rank in range(ranks):
            right = torch.cat([third.chunk(ranks, 0)[rank] for third in weight.chunk(3, 0)])
            result = call(function, weight.clone(), heads, rank, ranks)
            if not isinstance(result, torch.Tensor) or result.dim() != 2:
                got = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
                raise Mistake(f"It returned {got}; it should return rows of the weight.")
            if torch.equal(result, right):
                continue
            if torch.equal(result, weight.chunk(ranks, 0)[rank]):
                raise Mistake(
                    f"That is the matrix in {ranks} equal pieces: with {heads} heads rank 0 gets queries whose keys "
                    "are elsewhere. Cut query, key and value each."
                )
            if torch.equal(result.sort(0).values, right.sort(0).values):
                raise Mistake("The right rows in another order: query first, then key, then value.")
            needed, returned = (rows[:24, 0].int().tolist() for rows in (right, result))
            raise Mistake(f"For rank {rank} of {ranks} with {heads} heads, rows {needed} are needed, not {returned}.")
    return "Each rank has whole heads: their queries, their keys, their values."


def check_shared_heads(function: Callable[[torch.Tensor, int], torch.Tensor]) -> str:
    """``function(gradient, kv_heads)`` is the sum over the ranks that hold the same head of keys and values."""
    on_ranks(4, _try_shared, function, fresh_seed())
    return "Every replica of a head has the gradient of all query heads that use it."


def _try_shared(function: Callable, seed: int) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = [gpt.numbers(16, 8, seed=seed + other) for other in range(size)]
    for kv_heads in (2, 1, 4):
        replicas = size // kv_heads
        first = rank // replicas * replicas
        right = sum(gradients[first : first + replicas])
        where = f"(with {kv_heads} heads of keys and values on {size} ranks)."
        mistakes = [
            (gradients[rank], f"that is this rank's own gradient: others hold the same head {where}"),
            (sum(gradients), f"that is the sum over all ranks: different heads were added {where}"),
            (right / replicas, f"that is the mean; each replica needs the sum {where}"),
            (
                sum(gradients[rank % kv_heads :: kv_heads]),
                f"every other rank was added; neighbours hold the same head {where}",
            ),
        ]
        result = function(gradients[rank].clone(), kv_heads)
        otherwise = f"that is not the sum over the ranks that hold the same head, with {kv_heads} heads"
        if problem := compare_tensors(result, right, mistakes, otherwise):
            return problem
    return ""


@exercise("qkv_rows")
def my_rows(weight, heads, rank, ranks):
    """The weight is three matrices in one. A head is of use to a rank only with all three of its parts."""
    query, key, value = weight.chunk(3)
    # Heads lie one after the other in each, so an equal piece of each is whole heads.
    return torch.cat([part.chunk(ranks)[rank] for part in (query, key, value)])


@exercise("shared_heads")
def my_shared_sum(gradient, kv_heads):
    """Which ranks use the same head of keys and values? They need a group of their own, and a group is made by all
    ranks together, also by those that are not in it."""
    ranks = dist.get_world_size()
    replicas = ranks // kv_heads
    # Neighbours hold the same head; every rank makes every group, or the others wait.
    groups = [dist.new_group(list(range(at, at + replicas))) for at in range(0, ranks, replicas)]
    dist.all_reduce(gradient, group=groups[dist.get_rank() // replicas])
    return gradient
