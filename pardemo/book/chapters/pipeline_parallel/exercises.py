"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable, Iterable

from pardemo import pipeline_parallel as pp
from pardemo.book.page.exercises import Mistake, call, exercise, formula
from pardemo.formulas import pipeline as formulas
from pardemo.pipeline_parallel import Schedule, ScheduleError, prove
from pardemo.pipeline_parallel.instructions import Compute

#: Ranks, micro-batches, and how many of these a rank has memory for.
SIZES = ((2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 8, 9), (3, 7, 1), (4, 2, 4), (1, 3, 1))


def check_order(function: Callable[[int, int, int, int], Iterable[Compute]]) -> str:
    """``function(rank, ranks, micro_batches, most)`` yields a 1F1B in which no rank holds more than ``most``."""
    for ranks, m, most in SIZES:
        where = f"{ranks} ranks, {m} micro-batches, memory for {most}"
        try:
            steps = prove(Schedule(order_of(function, most), ranks, m))
        except ScheduleError as error:
            raise Mistake(f"{where}: {error}.") from None
        for rank, held in enumerate(steps.in_flight):
            if held > most:
                raise Mistake(f"{where}: rank {rank} holds {held} micro-batches.")
            if held > (allowed := formulas.in_flight("one_f_one_b", rank, ranks, m)):
                raise Mistake(f"{where}: rank {rank} holds {held} micro-batches, and {allowed} are enough.")
        ideal = prove(Schedule(order_of(my_order, most), ranks, m)).makespan
        if steps.makespan > ideal:
            raise Mistake(
                f"{where}: it takes {steps.makespan:g} units, and {ideal:g} are enough: let more begin ahead."
            )
    return f"Proven for {len(SIZES)} sizes: nothing missing, no deadlock, within the memory, and as fast as it allows."


def order_of(function: Callable, most: int) -> Callable[[int, int, int], list[Compute]]:
    """An answer ``function(rank, ranks, micro_batches, most)`` as an order; what is no order is a Mistake."""

    def order(rank: int, ranks: int, micro_batches: int) -> list[Compute]:
        instructions = call(function, rank, ranks, micro_batches, most)
        try:
            instructions = list(instructions)
        except TypeError:
            raise Mistake(f"It returned {instructions!r}; yield Forward(rank, k) and Backward(rank, k).") from None
        except Exception as error:  # a generator's own
            raise Mistake(f"Your generator raised {type(error).__name__}: {error}") from None
        strange = [instruction for instruction in instructions if not isinstance(instruction, Compute)]
        if strange:
            raise Mistake(f"It yielded {strange[0]!r}; yield Forward(rank, k) and Backward(rank, k).")
        return instructions

    return order


@formula(
    ((4, 0.1), (8, 0.2), (2, 0.5), (64, 0.05), (1, 0.1)),
    "m ≥ (p−1)(1−share)/share: 27 micro-batches for four stages and a tenth.",
    unit="micro-batches",
)
def check_bubble(stages: int, share: float):
    """The least m whose bubble is at most that share of the total time."""
    right = formulas.micro_batches_for(stages, share)
    return right, [
        (
            max(1, round((stages - 1) / share)),
            "that makes it this share of the ideal time; of the total time it is smaller",
        ),
        (lambda answer: answer < 1, "at least one micro-batch goes through"),
        (lambda answer: answer < right, "that is too few, and more than this share of the total time is idle"),
        (lambda answer: answer > right, "that is too many, fewer are enough"),
    ]


@exercise("order")
def my_order(rank, ranks, micro_batches, most):
    """Write down the loop of section 3 with yield. One number in it decides how many micro-batches a rank holds: how
    large may that number be now?"""
    # A rank holds one more than it is ahead. Rank 0 of four would be 3 ahead; with
    # memory for two it can be ahead by one only, and waits a little longer.
    ahead = min(ranks - 1 - rank, most - 1, micro_batches)
    for k in range(ahead):
        yield pp.Forward(rank, k)
    for k in range(ahead, micro_batches):
        yield pp.Forward(rank, k)
        yield pp.Backward(rank, k - ahead)
    for k in range(micro_batches - ahead, micro_batches):
        yield pp.Backward(rank, k)


@exercise("bubble")
def my_micro_batches(stages, share):
    """Take the forward and backward of one micro-batch as the unit of time. How many units does a rank work, and how
    many does it wait?"""
    # A rank works for m units and waits for stages − 1. To try one m after the other
    # is slower than a formula, and cannot be rounded the wrong way.
    m = 1
    while (stages - 1) / (m + stages - 1) > share:
        m += 1
    return m
