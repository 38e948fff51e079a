"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Callable
from numbers import Real

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import POINT_TO_POINT, Exercise, Mistake, call, fresh_seed
from pardemo.formulas import communication
from pardemo.meters import CallMeter
from pardemo.world import World

EXERCISES = {
    "bus_bandwidth": Exercise(
        "my_bus_bandwidth",
        "Ask what one rank has to send on a ring, not how large the array is. How many times does each of the three "
        "collectives go round?",
    ),
    "neighbour": Exercise(
        "my_neighbour",
        "Every rank sends to the right and receives from the left. Which of the two calls goes on without waiting for "
        "the other side, so that nobody waits for everybody?",
    ),
}

RANKS = 4
TIMEOUT_S = 30


def check_neighbour(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """``function(number)`` is the sum of this rank's number and its left neighbour's, on every rank."""
    numbers = [float(number) for number in random.Random(fresh_seed()).sample(range(1000, 10_000), RANKS)]
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        attempts = world.run(_try_neighbour, function, numbers)
    values = [value for value, _ in attempts]

    def answers(wanted: Callable[[int], float]) -> list[bool]:
        return [isinstance(value, Real) and value == wanted(r) for r, value in enumerate(values)]

    right = answers(lambda r: numbers[r] + numbers[r - 1])
    guesses = {
        "that is the number that you were given": lambda r: numbers[r],
        "that is the neighbour's number alone; add your own": lambda r: numbers[r - 1],
        "that is with the right neighbour; the left one of rank r is r − 1": lambda r: (
            numbers[r] + numbers[(r + 1) % RANKS]
        ),
        "that is the sum of all ranks: a collective says more than was asked": lambda r: sum(numbers),
    }
    if all(right):
        if calls := sorted({name for _, names in attempts for name in names}):
            raise Mistake(f"Right, but by {calls[0]}, which brings every rank's number: send one, and receive one.")
        return "Each rank sent one number and received one: a ring's first step."
    for hint, guess in guesses.items():
        if all(answers(guess)):
            raise Mistake(f"Rank 1 returned {values[1]!r}: {hint}.")
    wrong = right.index(False)
    raise Mistake(f"Rank {wrong} should return {numbers[wrong] + numbers[wrong - 1]:g}, not {values[wrong]!r}.")


def _try_neighbour(function: Callable, numbers: list[float]) -> tuple[object, set[str]]:
    with CallMeter() as calls:
        result = function(torch.tensor([numbers[dist.get_rank()]]))
    value = result.item() if isinstance(result, torch.Tensor) and result.numel() == 1 else result
    return value, set(calls.counts) - POINT_TO_POINT


def check_bus_bandwidth(function: Callable[[str, int, int, float], float]) -> str:
    """``function(collective, nbytes, ranks, seconds)`` is nccl-tests' busbw in bytes per second."""
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        for nbytes, ranks, seconds in ((8 << 20, 4, 0.5), (1 << 20, 8, 0.25)):
            expected = communication.bus_bandwidth(collective, nbytes, ranks, seconds)
            answer = call(function, collective, nbytes, ranks, seconds)
            if isinstance(answer, Real) and abs(answer - expected) <= 1e-6 * expected:
                continue
            hint = _bandwidth_hint(collective, answer, nbytes, ranks, seconds)
            case = f"{collective} of {nbytes:,} bytes, {ranks} ranks, {seconds} s"
            raise Mistake(f"For {case}: {expected:,.0f} bytes/s, not {answer!r}{hint}.")
    return "What a link carries, whatever the number of ranks."


def _bandwidth_hint(collective: str, answer: object, nbytes: int, ranks: int, seconds: float) -> str:
    guesses = {
        "that is algbw, size over time; what a rank sends is another amount": nbytes / seconds,
        "a reduce-scatter or an all-gather is one half of an all-reduce": 2 * (ranks - 1) / ranks * nbytes / seconds,
        "an all-reduce is both halves": (ranks - 1) / ranks * nbytes / seconds,
        "all ranks' bytes together; busbw is one rank's": 2 * (ranks - 1) * nbytes / seconds,
    }
    close = (
        text for text, guess in guesses.items() if isinstance(answer, Real) and abs(answer - guess) <= 1e-6 * guess
    )
    return "".join(f": {text}" for text in list(close)[:1])


def my_neighbour(number):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(number)
    send = dist.isend(number, (rank + 1) % n)  # goes on at once; send would wait here
    dist.recv(received, (rank - 1) % n)
    send.wait()
    return number + received


def my_bus_bandwidth(collective, nbytes, ranks, seconds):
    # On a ring a rank sends (N−1)/N of the array per round, and an all-reduce
    # goes round twice: reduce-scatter, then all-gather.
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (ranks - 1) / ranks * nbytes / seconds
