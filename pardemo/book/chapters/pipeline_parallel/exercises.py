"""The exercises of this chapter, and what checks an answer to each."""

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real

from pardemo import pipeline_parallel as pp
from pardemo.book.page.exercises import Exercise, Mistake, call
from pardemo.formulas import pipeline as formulas
from pardemo.pipeline_parallel import Backward, Forward, Schedule, ScheduleError, chart, one_f_one_b, prove, zb_v
from pardemo.pipeline_parallel.instructions import Compute

EXERCISES = {
    "bubble": Exercise(
        "my_micro_batches",
        "Take the forward and backward of one micro-batch as the unit of time. How many units does a rank work, and "
        "how many does it wait?",
    ),
    "idle": Exercise(
        "my_idle",
        "Sort the computations of a rank by their begin, and remember until when the rank has been busy. A computation "
        "that ends before that adds nothing.",
    ),
    "order": Exercise(
        "my_order",
        "Write down the loop of section 3 with yield. One number in it decides how many micro-batches a rank holds: "
        "how large may that number be now?",
    ),
}

#: Ranks, micro-batches, and how many of these a rank has memory for.
SIZES = ((2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 8, 9), (3, 7, 1), (4, 2, 4), (1, 3, 1))


def check_order(function: Callable[[int, int, int, int], Iterable[Compute]]) -> str:
    """``function(rank, ranks, micro_batches, most)`` yields a 1F1B in which no rank holds more than ``most``."""
    for ranks, m, most in SIZES:
        where = f"{ranks} ranks, {m} micro-batches, memory for {most}"
        try:
            chart = prove(Schedule(_order_of(function, most), ranks, m))
        except ScheduleError as error:
            raise Mistake(f"{where}: {error}.") from None
        for rank, held in enumerate(chart.in_flight):
            if held > most:
                raise Mistake(f"{where}: rank {rank} holds {held} micro-batches.")
            if held > (allowed := formulas.in_flight("one_f_one_b", rank, ranks, m)):
                raise Mistake(f"{where}: rank {rank} holds {held} micro-batches, and {allowed} are enough.")
        ideal = prove(Schedule(_expected_order(most), ranks, m)).makespan
        if chart.makespan > ideal:
            raise Mistake(
                f"{where}: it takes {chart.makespan:g} units, and {ideal:g} are enough: let more begin ahead."
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


def _expected_order(most: int) -> Callable[[int, int, int], list[Compute]]:
    """1F1B in which no rank holds more than ``most`` micro-batches: the order that the exercise asks for."""

    def order(rank: int, ranks: int, micro_batches: int) -> list[Compute]:
        ahead = min(ranks - rank - 1, most - 1, micro_batches)
        turns = [
            instruction
            for k in range(ahead, micro_batches)
            for instruction in (Forward(rank, k), Backward(rank, k - ahead))
        ]
        begin = [Forward(rank, k) for k in range(ahead)]
        return begin + turns + [Backward(rank, k) for k in range(micro_batches - ahead, micro_batches)]

    return order


def check_bubble(function: Callable[[int, float], int]) -> str:
    """``function(stages, share)`` is the least m whose bubble is at most that share of the total time."""
    for stages, share in ((4, 0.1), (8, 0.2), (2, 0.5), (64, 0.05), (1, 0.1)):
        answer, expected = call(function, stages, share), formulas.micro_batches_for(stages, share)
        if isinstance(answer, bool) or not isinstance(answer, Real) or not math.isfinite(answer):
            raise Mistake(f"It returned {answer!r}; it should return a number of micro-batches.")
        if answer == expected:
            continue
        of_ideal = max(1, round((stages - 1) / share))
        where = f"For {stages} stages and a share of {share:g}"
        if answer == of_ideal:
            raise Mistake(
                f"{where}: {answer:g} makes it that share of the ideal time; of the total time it is smaller."
            )
        if answer < 1:
            raise Mistake(f"{where}: at least one micro-batch goes through.")
        reached = formulas.bubble_of_total(stages, round(answer))
        verdict = "too many, fewer are enough" if answer > expected else "too few"
        raise Mistake(f"{where}: {answer:g} leaves {reached:.3f} of the total time idle; that is {verdict}.")
    return "m ≥ (p−1)(1−share)/share: 27 micro-batches for four stages and a tenth."


Spans = Sequence[tuple[int, float, float]]  # (rank, begin, end)
#: Two ranks; the first takes a forward and a backward together from 2 to 5, and the second begins late.
PAIR: Spans = ((0, 0, 1), (0, 1, 2), (1, 1, 2), (1, 2, 4), (0, 2, 5), (0, 2, 5), (1, 5, 6), (0, 6, 8))


def timetables() -> dict[str, Spans]:
    """The steps that an answer is checked with; by hand the four ways to count come to four answers."""
    cases = {"a pair, by hand": PAIR}
    for name, schedule in (("1F1B", Schedule(one_f_one_b, 3, 4)), ("ZB-V", Schedule(zb_v, 3, 5, 2))):
        cases[name] = tuple((span.rank, span.begin_s, span.end_s) for span in chart(schedule).spans)
    return cases


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


def check_idle(function: Callable[[list[tuple[int, float, float]]], list[float]]) -> str:
    """``function(spans)`` is each rank's idle time, from the first begin of all ranks to the last end of all."""
    for name, spans in timetables().items():
        answer, expected = call(function, list(spans)), idle_of(spans)
        if not isinstance(answer, list | tuple) or not all(isinstance(each, Real) for each in answer):
            raise Mistake(f"It returned {answer!r}; it should return a list with a number for each rank.")
        if len(answer) != len(expected):
            raise Mistake(f"{name}: there are {len(expected)} ranks, and {len(answer)} numbers.")
        if _equal(answer, expected):
            continue
        mistakes = {
            "The two of a pair run at the same time: count that time once.": idle_of(spans, pairs_twice=True),
            "That is the time between a rank's own first begin and its own last end, as the zero-bubble papers count. "
            "The step begins with the first rank and ends with the last one.": idle_of(spans, own_ends=True),
            "Count from the first begin of all ranks to the last end of all, and the time of a pair once.": idle_of(
                spans, own_ends=True, pairs_twice=True
            ),
        }
        for message, wrong in mistakes.items():
            if _equal(answer, wrong):
                raise Mistake(f"{name}: {message}")
        rank = next(rank for rank, pair in enumerate(zip(answer, expected, strict=True)) if not _equal(*zip(pair)))
        raise Mistake(f"{name}: rank {rank} is idle for {expected[rank]:g}, not {answer[rank]:g}.")
    return "Right for 1F1B, for ZB-V and for a pair: 1F1B's three ranks wait 6 each, ZB-V's 1."


def _equal(answer: Iterable[float], expected: Iterable[float]) -> bool:
    return all(math.isclose(a, e, abs_tol=1e-9) for a, e in zip(answer, expected, strict=True))


def my_order(rank, ranks, micro_batches, most):
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


def my_micro_batches(stages, share):
    # A rank works for m units and waits for stages − 1. To try one m after the other
    # is slower than a formula, and cannot be rounded the wrong way.
    m = 1
    while (stages - 1) / (m + stages - 1) > share:
        m += 1
    return m


def my_idle(spans):
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
