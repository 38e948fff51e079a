"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from pardemo import pipeline_parallel as pp
from pardemo.book.chapters.pipeline_parallel.exercises import order_of
from pardemo.book.page.exercises import Mistake, exercise, formula
from pardemo.pipeline_parallel import Schedule, ScheduleError, chart, one_f_one_b, prove, zb_v
from pardemo.pipeline_parallel.instructions import BackwardInput, BackwardWeight, Compute

#: Ranks, micro-batches, and how many weights' gradients a rank may have put off at one time.
SIZES = ((2, 4, 1), (4, 8, 2), (4, 8, 0), (4, 8, 9), (3, 7, 1), (4, 2, 3), (1, 3, 1))


def check_late(function: Callable[[int, int, int, int], Iterable[Compute]]) -> str:
    """``function(rank, ranks, micro_batches, late)`` yields ZB-H1 with at most ``late`` weights' gradients put off."""
    for ranks, m, late in SIZES:
        where = f"{ranks} ranks, {m} micro-batches, at most {late} put off"
        schedule = Schedule(order_of(function, late), ranks, m)
        try:
            steps = prove(schedule)
        except ScheduleError as error:
            raise Mistake(f"{where}: {error}.") from None
        if any(isinstance(step, pp.Backward) for step in schedule.computes(0)):
            raise Mistake(f"{where}: a whole Backward puts nothing off; yield BackwardInput and BackwardWeight.")
        for rank in range(ranks):
            if (off := _most_put_off(schedule.computes(rank))) > late:
                raise Mistake(f"{where}: rank {rank} has put {off} weights' gradients off at one time.")
        ideal = prove(Schedule(order_of(my_late, late), ranks, m)).makespan
        if steps.makespan > ideal:
            raise Mistake(f"{where}: it takes {steps.makespan:g} units, and {ideal:g} are enough: put more off.")
    return f"Proven for {len(SIZES)} sizes: nothing missing, no deadlock, and as fast as what may be put off allows."


def _most_put_off(steps: Sequence[Compute]) -> int:
    """Weights' gradients that wait at one time, without one that comes directly behind its input's."""
    waiting = accumulate(isinstance(step, BackwardInput) - isinstance(step, BackwardWeight) for step in steps)
    return max((n for n, step in zip(waiting, steps, strict=True) if not isinstance(step, BackwardInput)), default=0)


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
        mine = sorted((begin, end) for of_rank, begin, end in spans if of_rank == rank)
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


@exercise("late")
def my_late(rank, ranks, micro_batches, late):
    """Take `weights_later` of section 1. Rank i is i weights' gradients behind there: how many may it be now?"""
    # Rank 3 of four would be 3 behind. If only two may be put off, its W come earlier,
    # and the ranks before it wait a little longer for their gradients.
    ahead, behind = min(ranks - 1 - rank, micro_batches), min(rank, micro_batches, late)
    for k in range(ahead):
        yield pp.Forward(rank, k)
    for k in range(micro_batches):
        if ahead + k < micro_batches:
            yield pp.Forward(rank, ahead + k)
        yield pp.BackwardInput(rank, k)
        if k >= behind:
            yield pp.BackwardWeight(rank, k - behind)
    for k in range(micro_batches - behind, micro_batches):
        yield pp.BackwardWeight(rank, k)


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
