"""Checkers of notebook 02."""

import math
from collections.abc import Callable, Iterable
from numbers import Real

from pardemo.collection.exercises import Mistake, call
from pardemo.formulas import pipeline as formulas
from pardemo.pipeline_parallel import Schedule, ScheduleError, one_f_one_b, prove
from pardemo.pipeline_parallel.instructions import Compute

SIZES = ((2, 4), (4, 8), (4, 2), (3, 7), (1, 3))


def check_1f1b(function: Callable[[int, int, int], Iterable[Compute]]) -> str:
    """``function(rank, ranks, micro_batches)`` yields 1F1B's forwards and backwards."""

    def order(rank: int, ranks: int, micro_batches: int) -> list[Compute]:
        found = call(function, rank, ranks, micro_batches)
        try:
            found = list(found)
        except TypeError:
            raise Mistake(f"It returned {found!r}; yield Forward(rank, k) and Backward(rank, k).") from None
        except Exception as error:  # a generator's own
            raise Mistake(f"Your generator raised {type(error).__name__}: {error}") from None
        strange = [one for one in found if not isinstance(one, Compute)]
        if strange:
            raise Mistake(f"It yielded {strange[0]!r}; yield Forward(rank, k) and Backward(rank, k).")
        return found

    for ranks, m in SIZES:
        where = f"{ranks} ranks, {m} micro-batches"
        try:
            chart = prove(Schedule(order, ranks, m))
        except ScheduleError as error:
            raise Mistake(f"{where}: {error}.") from None
        for rank, most in enumerate(chart.in_flight):
            allowed = formulas.in_flight("one_f_one_b", rank, ranks, m)
            if most > allowed:
                raise Mistake(f"{where}: rank {rank} has {most} micro-batches in flight; {allowed} are enough.")
        ideal = prove(Schedule(one_f_one_b, ranks, m)).makespan
        if chart.makespan > ideal:
            raise Mistake(
                f"{where}: it takes {chart.makespan:g} units, and {ideal:g} are enough: let more begin ahead."
            )
    return "Proven for five sizes: nothing missing, no deadlock, the smallest memory and the smallest bubble."


def check_bubble(function: Callable[[int, float], int]) -> str:
    """``function(stages, share)`` is the least m whose bubble is at most that share of all time."""
    for stages, share in ((4, 0.1), (8, 0.2), (2, 0.5), (64, 0.05), (1, 0.1)):
        found, expected = call(function, stages, share), formulas.micro_batches_for(stages, share)
        if isinstance(found, bool) or not isinstance(found, Real) or not math.isfinite(found):
            raise Mistake(f"It returned {found!r}; it should return a number of micro-batches.")
        if found == expected:
            continue
        of_ideal = max(1, round((stages - 1) / share))
        where = f"For {stages} stages and a share of {share:g}"
        if found == of_ideal:
            raise Mistake(f"{where}: {found:g} makes it that share of the ideal time; of all time it is smaller.")
        if found < 1:
            raise Mistake(f"{where}: at least one micro-batch goes through.")
        reached = formulas.bubble_of_total(stages, round(found))
        much = "too many, fewer are enough" if found > expected else "too few"
        raise Mistake(f"{where}: {found:g} leaves {reached:.3f} of the time idle; that is {much}.")
    return "m ≥ (p−1)(1−share)/share: 27 micro-batches for four stages and a tenth."
