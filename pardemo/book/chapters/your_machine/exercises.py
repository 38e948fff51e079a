"""The exercises of this chapter, and what checks an answer to each."""

import itertools
import random
from collections.abc import Callable
from numbers import Real

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import POINT_TO_POINT, Mistake, exercise, formula, fresh_seed, on_ranks
from pardemo.formulas import communication
from pardemo.meters import CallMeter

RANKS = 4


def check_neighbour(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """``function(number)`` is the sum of this rank's number and its left neighbour's, on every rank."""
    numbers = [float(number) for number in random.Random(fresh_seed()).sample(range(1000, 10_000), RANKS)]
    values, calls = zip(*on_ranks(RANKS, _try_neighbour, function, numbers), strict=True)
    ranks = range(RANKS)
    right = [numbers[r] + numbers[r - 1] for r in ranks]
    mistakes = (
        (numbers, "that is the number that you were given"),
        ([numbers[r - 1] for r in ranks], "that is the neighbour's number alone; add your own"),
        (
            [numbers[r] + numbers[(r + 1) % RANKS] for r in ranks],
            "that is with the right neighbour; the left one of rank r is r − 1",
        ),
        ([sum(numbers)] * RANKS, "that is the sum of all ranks: a collective says more than was asked"),
    )
    if all(isinstance(value, Real) for value in values):
        for wrong, hint in mistakes:
            if list(values) == wrong:
                raise Mistake(f"Rank 1 returned {values[1]!r}: {hint}.")
    for rank, value in enumerate(values):
        if not isinstance(value, Real) or value != right[rank]:
            raise Mistake(f"Rank {rank} should return {right[rank]:g}, not {value!r}.")
    if others := sorted(set().union(*calls) - POINT_TO_POINT):
        raise Mistake(f"Right, but by {others[0]}, which brings every rank's number: send one, and receive one.")
    return "Each rank sent one number and received one: a ring's first step."


def _try_neighbour(function: Callable, numbers: list[float]) -> tuple[object, set[str]]:
    with CallMeter() as calls:
        result = function(torch.tensor([numbers[dist.get_rank()]]))
    return result.item() if isinstance(result, torch.Tensor) and result.numel() == 1 else result, set(calls.counts)


@formula(
    [
        (collective, *sizes)
        for collective, sizes in itertools.product(
            ("all_reduce", "reduce_scatter", "all_gather"), ((8 << 20, 4, 0.5), (1 << 20, 8, 0.25))
        )
    ],
    "What a link carries, whatever the number of ranks.",
    unit="bytes/s",
)
def check_bus_bandwidth(collective: str, nbytes: int, ranks: int, seconds: float):
    """nccl-tests' busbw in bytes per second."""
    half = (ranks - 1) / ranks * nbytes / seconds
    return communication.bus_bandwidth(collective, nbytes, ranks, seconds), [
        (nbytes / seconds, "that is algbw, size over time; what a rank sends is another amount"),
        (2 * half, "a reduce-scatter or an all-gather is one half of an all-reduce"),
        (half, "an all-reduce is both halves"),
        (2 * ranks * half, "all ranks' bytes together; busbw is one rank's"),
    ]


@exercise("neighbour")
def my_neighbour(number):
    """Every rank sends to the right and receives from the left. Which of the two calls goes on without waiting for
    the other side, so that nobody waits for everybody?"""
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(number)
    send = dist.isend(number, (rank + 1) % n)  # goes on at once; send would wait here
    dist.recv(received, (rank - 1) % n)
    send.wait()
    return number + received


@exercise("bus_bandwidth")
def my_bus_bandwidth(collective, nbytes, ranks, seconds):
    """Ask what one rank has to send on a ring, not how large the array is. How many times does each of the three
    collectives go round?"""
    # On a ring a rank sends (N−1)/N of the array per round, and an all-reduce
    # goes round twice: reduce-scatter, then all-gather.
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (ranks - 1) / ranks * nbytes / seconds
