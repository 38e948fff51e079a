"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from pardemo import pipeline_parallel as pp
from pardemo.book.page.exercises import Mistake, call, exercise, formula
from pardemo.formulas import pipeline as formulas
from pardemo.pipeline_parallel import Schedule, ScheduleError, chart, one_f_one_b, prove, zb_v
from pardemo.pipeline_parallel.instructions import Compute

#: Ranks, micro-batches, and how many of these a rank has memory for.
SIZES = ((2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 8, 9), (3, 7, 1), (4, 2, 4), (1, 3, 1))


def check_order(function: Callable[[int, int, int, int], Iterable[Compute]]) -> str:
    """``function(rank, ranks, micro_batches, most)`` yields a 1F1B in which no rank holds more than ``most``."""
    for ranks, m, most in SIZES:
        where = f"{ranks} ranks, {m} micro-batches, memory for {most}"
        try:
            steps = prove(Schedule(_order_of(function, most), ranks, m))
        except ScheduleError as error:
            raise Mistake(f"{where}: {error}.") from None
        for rank, held in enumerate(steps.in_flight):
            if held > most:
                raise Mistake(f"{where}: rank {rank} holds {held} micro-batches.")
            if held > (allowed := formulas.in_flight("one_f_one_b", rank, ranks, m)):
                raise Mistake(f"{where}: rank {rank} holds {held} micro-batches, and {allowed} are enough.")
        ideal = prove(Schedule(_order_of(my_order, most), ranks, m)).makespan
        if steps.makespan > ideal:
            raise Mistake(
                f"{where}: it takes {steps.makespan:g} units, and {ideal:g} are enough: let more begin ahead."
            )
    return f"Proven for {len(SIZES)} sizes: nothing missing, no deadlock, within the memory, and as fast as it allows."


def _order_of(function: Callable, most: int) -> Callable[[int, int, int], list[Compute]]:
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


Spans = Sequence[tuple[int, float, float]]  # (rank, begin, end)
#: Two ranks; the first takes a forward and a backward together from 2 to 5, and the second begins late.
PAIR: Spans = ((0, 0, 1), (0, 1, 2), (1, 1, 2), (1, 2, 4), (0, 2, 5), (0, 2, 5), (1, 5, 6), (0, 6, 8))


def _timetables(_: random.Random) -> Iterator[tuple[Spans]]:
    """The steps that an answer is checked with; by hand the four ways to count come to four answers."""
    yield (list(PAIR),)
    for schedule in (Schedule(one_f_one_b, 3, 4), Schedule(zb_v, 3, 5, 2)):
        yield ([(span.rank, span.begin_s, span.end_s) for span in chart(schedule).spans],)


def idle_of(spans: Spans, own_ends: bool = False, pairs_twice: bool = False) -> list[float]:
    """Each rank's idle time in a step; or as it is often miscounted.

    Args:
        own_ends: between a rank's own first begin and its own last end, as the zero-bubble papers count.
        pairs_twice: computations that run together count as if they ran one after the other.
    """
    counted = []
    for rank in sorted({rank for rank, _, _ in spans}):
        mine = sorted((begin, end) for of, begin, end in spans if of == rank)
        step = mine if own_ends else [(begin, end) for _, begin, end in spans]
        busy, until = 0.0, float("-inf")
        for begin, end in mine:
            busy += end - begin if pairs_twice else max(0.0, end - max(begin, until))
            until = max(until, end)
        counted.append(max(end for _, end in step) - min(begin for begin, _ in step) - busy)
    return counted


@formula(
    _timetables,
    "Right for 1F1B, for ZB-V and for a pair: 1F1B's three ranks wait 6 each, ZB-V's 1.",
    asked="a list with a number for each rank",
)
def check_idle(spans: Spans):
    """Each rank's idle time, from the first begin of all ranks to the last end of all."""
    right = idle_of(spans)
    return right, [
        (lambda answer: len(answer) != len(right), f"there are {len(right)} ranks"),
        (idle_of(spans, pairs_twice=True), "the two of a pair run at the same time: count that time once"),
        (
            idle_of(spans, own_ends=True),
            "that is the time between a rank's own first begin and its own last end, as the zero-bubble papers count. "
            "The step begins with the first rank and ends with the last one",
        ),
        (
            idle_of(spans, own_ends=True, pairs_twice=True),
            "count from the first begin of all ranks to the last end of all, and the time of a pair once",
        ),
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


@exercise("idle")
def my_idle(spans):
    """Sort the computations of a rank by their begin, and remember until when the rank has been busy. A computation
    that ends before that adds nothing."""
    # Not from a rank's own first computation: it may begin late, and has to wait
    # before it. And not by adding up: two of a pair run at the same time.
    first = min(begin for _, begin, _ in spans)
    last = max(end for _, _, end in spans)
    idle = []
    for rank in sorted({rank for rank, _, _ in spans}):
        waited, until = 0, first
        for begin, end in sorted(span[1:] for span in spans if span[0] == rank):
            waited += max(0, begin - until)
            until = max(until, end)
        idle.append(waited + last - until)
    return idle
