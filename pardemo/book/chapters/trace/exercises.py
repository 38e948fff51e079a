"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Iterator

from pardemo.book.page.exercises import exercise, formula

Bars = list[tuple[float, float]]


def _threads(draw: random.Random) -> Iterator[tuple[Bars]]:
    return ((_nested(draw, 0.0, 100.0, 3),) for _ in range(6))


def _nested(draw: random.Random, begin: float, end: float, depth: int) -> Bars:
    """A bar with two bars inside it, each with two inside it, ``depth`` deep, in the order of their begins."""
    bars = [(begin, end)]
    if depth:
        cuts = sorted(draw.uniform(begin, end) for _ in range(4))
        for first, last in (cuts[:2], cuts[2:]):
            bars += _nested(draw, first, last, depth - 1)
    return bars


@formula(_threads, "Added up, own times are the thread's time, each moment once.", asked="a list of numbers")
def check_own(bars: Bars):
    """The own time of each bar (begin, end) of one thread, in the order of their begins."""
    right = my_own(bars)
    return right, [
        (lambda answer: len(answer) != len(right), f"there are {len(right)} bars"),
        ([end - begin for begin, end in bars], "some have others inside: a whole length is not an own time"),
        (
            lambda answer: any(a < r - 1e-9 for a, r in zip(answer, right, strict=True)),
            "take off only what is directly inside, and not what is inside of that once more",
        ),
    ]


def _steps(draw: random.Random) -> Iterator[tuple[Bars, Bars]]:
    yield from (([(2.0, 6.0)], [(0.0, 4.0)]), ([(2.0, 6.0), (3.0, 8.0)], [(0.0, 4.0)]))
    for _ in range(6):
        yield _some(draw), _some(draw)


def _some(draw: random.Random) -> Bars:
    begins = [float(draw.randrange(0, 40)) for _ in range(draw.randrange(1, 6))]
    return [(begin, begin + draw.randrange(1, 15)) for begin in begins]


@formula(_steps, "That is what a faster network could give back, and no more.")
def check_exposed(communication: Bars, computation: Bars):
    """Checks how long something of the first is open and nothing of the second; in any order, and they may overlap."""
    return my_exposed(communication, computation), [
        (
            sum(my_exposed([span], computation) for span in communication),
            "two that wait at the same time are counted twice",
        ),
        (my_exposed(communication, []), "that is all of the communication, hidden or not"),
    ]


@exercise("own")
def my_own(bars):
    """Walk through the bars in the order of their begins, and keep a pile of those that are still open. Whose time
    does a new bar take?"""
    own_s, open_bars = [end - begin for begin, end in bars], []  # numbers of bars that are not over
    for number, (begin, end) in enumerate(bars):
        while open_bars and bars[open_bars[-1]][1] <= begin:
            open_bars.pop()
        if open_bars:
            own_s[open_bars[-1]] -= end - begin
        open_bars.append(number)
    return own_s


@exercise("exposed")
def my_exposed(communication, computation):
    """First think of one all-reduce and one operator. When several all-reduces are open at the same time, the
    program still waits only once."""

    def together(bars):
        total, last = 0.0, float("-inf")
        for begin, end in sorted(bars):
            total += max(0.0, end - max(begin, last))
            last = max(last, end)
        return total

    # what the union has beyond the computation is communication alone
    return together([*communication, *computation]) - together(computation)
