"""The exercises of this chapter, and what checks an answer to each."""

import math
import random
from collections.abc import Callable

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed


def my_own(bars):
    own, open_bars = [end - begin for begin, end in bars], []  # numbers of bars that are not over
    for number, (begin, end) in enumerate(bars):
        while open_bars and bars[open_bars[-1]][1] <= begin:
            open_bars.pop()
        if open_bars:
            own[open_bars[-1]] -= end - begin
        open_bars.append(number)
    return own


def my_exposed(communication, computation):
    def together(bars):
        total, last = 0.0, float("-inf")
        for begin, end in sorted(bars):
            total += max(0.0, end - max(begin, last))
            last = max(last, end)
        return total

    # what the union has beyond the computation is communication alone
    return together([*communication, *computation]) - together(computation)


EXERCISES = {
    "own": Exercise(
        "my_own",
        "Walk through the bars in the order of their begins, and keep a pile of those that are still open. Whose time "
        "does a new bar take?",
    ),
    "exposed": Exercise(
        "my_exposed",
        "First think of one all-reduce and one operator. When several all-reduces are open at the same time, the "
        "program still waits only once.",
    ),
}


def check_own(function: Callable[[list[tuple[float, float]]], list[float]]) -> str:
    """``function(bars)`` has the own time of each bar (begin, end) of one thread, in the order of their begins."""
    chance = random.Random(fresh_seed())
    for _ in range(6):
        bars = _nested(chance, 0.0, 100.0, 3)
        answer = call(function, list(bars))
        if not isinstance(answer, (list, tuple)) or len(answer) != len(bars):
            raise Mistake(f"It returned {answer!r}; it should return a list of {len(bars)} numbers.")
        right = my_own(bars)
        if all(
            isinstance(a, (int, float)) and math.isclose(a, r, abs_tol=1e-9) for a, r in zip(answer, right, strict=True)
        ):
            continue
        wrong = next(n for n, (a, r) in enumerate(zip(answer, right, strict=True)) if not _same(a, r))
        if _same(answer[wrong], bars[wrong][1] - bars[wrong][0]):
            raise Mistake(f"Bar {bars[wrong]} has others inside: its whole length is not its own time.")
        if answer[wrong] < right[wrong]:
            raise Mistake(
                f"Bar {bars[wrong]}: {answer[wrong]:g} is too little, {right[wrong]:g} is right. Take off only what "
                "is directly inside, and not what is inside of that once more."
            )
        raise Mistake(f"Bar {bars[wrong]}: {answer[wrong]:g}, and {right[wrong]:g} is right.")
    return "Added up, own times are the thread's time, each moment once."


def _same(first: object, second: float) -> bool:
    return isinstance(first, (int, float)) and math.isclose(first, second, abs_tol=1e-9)


def _nested(chance: random.Random, begin: float, end: float, depth: int) -> list[tuple[float, float]]:
    """A bar with two bars inside it, each with two inside it, ``depth`` deep, in the order of their begins."""
    bars = [(begin, end)]
    if depth:
        cuts = sorted(chance.uniform(begin, end) for _ in range(4))
        for first, last in (cuts[:2], cuts[2:]):
            bars += _nested(chance, first, last, depth - 1)
    return bars


def check_exposed(function: Callable[..., float]) -> str:
    """``function(communication, computation)`` is how long something of the first is open and nothing of the second;
    both are lists of (begin, end), in any order, and may overlap."""
    chance = random.Random(fresh_seed())
    cases = [([(2.0, 6.0)], [(0.0, 4.0)]), ([(2.0, 6.0), (3.0, 8.0)], [(0.0, 4.0)])]
    cases += [(_some(chance), _some(chance)) for _ in range(6)]
    for communication, computation in cases:
        answer = call(function, list(communication), list(computation))
        if isinstance(answer, bool) or not isinstance(answer, (int, float)):
            raise Mistake(f"It returned {answer!r}; it should return a number.")
        right = my_exposed(communication, computation)
        if _same(answer, right):
            continue
        case = f"For all-reduces {_told(communication)} and operators {_told(computation)}"
        alone = sum(my_exposed([one], computation) for one in communication)
        if _same(answer, alone):
            raise Mistake(f"{case}: two that wait at the same time are counted twice; {right:g} is right.")
        if _same(answer, my_exposed(communication, [])):
            raise Mistake(f"{case}: that is all of the communication, hidden or not; {right:g} is right.")
        raise Mistake(f"{case}: {answer:g}, and {right:g} is right.")
    return "That is what a faster network could give back, and no more."


def _some(chance: random.Random) -> list[tuple[float, float]]:
    begins = [float(chance.randrange(0, 40)) for _ in range(chance.randrange(1, 6))]
    return [(begin, begin + chance.randrange(1, 15)) for begin in begins]


def _told(bars: list[tuple[float, float]]) -> str:
    return ", ".join(f"{begin:g} to {end:g}" for begin, end in bars)
