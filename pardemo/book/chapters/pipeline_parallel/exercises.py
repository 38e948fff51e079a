"""The exercises of this chapter, and what checks an answer to each."""

import math
from collections.abc import Callable, Iterable
from numbers import Real

from pardemo.book.page.exercises import Exercise, Mistake, call
from pardemo.formulas import pipeline as formulas
from pardemo.pipeline_parallel import Backward, Forward, Schedule, ScheduleError, prove
from pardemo.pipeline_parallel.instructions import Compute

EXERCISES = {
    "bubble": Exercise(
        "my_micro_batches",
        "Take the forward and backward of one micro-batch as the unit of time. How many units does a rank work, and "
        "how many does it wait?",
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
