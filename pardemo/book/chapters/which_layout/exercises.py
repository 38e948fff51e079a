"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Iterator, Sequence

from pardemo.book.page.exercises import exercise, formula

Candidate = tuple[str, float, float]  # layout, seconds of a step, bytes of a GPU


def _choices(draw: random.Random) -> Iterator[tuple[list[Candidate], float, float]]:
    """The quickest do not fit, then one that fits and a smaller one within 3 % of it, then slower ones."""
    for free in (0.1, 0.0, 0.3, 0.5):
        room, quick = draw.choice((40e9, 80e9, 190e9)), draw.uniform(4, 9)
        costs = ((0.8, 1.15), (0.9, 1.02), (1.0, 0.99), (1.02, 0.7), (1.1, 0.5), (1.6, 0.2))
        names = draw.sample([f"TP{t} PP{p}" for t in (1, 2, 4, 8) for p in (1, 2, 4, 8)], len(costs))
        most = (1 - free) * room
        candidates = [(name, quick * t, most * share) for name, (t, share) in zip(names, costs, strict=True)]
        yield draw.sample(candidates, len(candidates)), room, free


@formula(
    _choices,
    "Who takes the smaller of two equally quick layouts has room for the day on which something else grows.",
    asked="the name of one of the candidates",
)
def check_headroom(candidates: Sequence[Candidate], room: float, free: float):
    """The layout to take: fits with a share ``free`` left, quick, and small."""
    right = my_headroom(candidates, room, free)
    cost = {name: (seconds, nbytes) for name, seconds, nbytes in candidates}
    seconds, nbytes = cost[right]
    return right, [
        (lambda name: name not in cost, "it should return the name of one of the candidates"),
        (
            lambda name: cost[name][1] > (1 - free) * room,
            f"{free:.0%} has to stay free, of the room and not of what it takes itself",
        ),
        (lambda name: cost[name][0] > 1.03 * seconds, f"{right} fits as well, with {seconds:.2f} s"),
        (
            lambda name: cost[name][1] > nbytes,
            f"both are within 3 % of the quickest; the first takes {nbytes / 1e9:.0f} GB, and the other one more",
        ),
    ]


#: Seconds of steps by their parts, as the planner has them for an 8B model on 32 H100.
_PAIRS = (
    (  # TP 8 inside a node, TP 16 across
        {"matrix multiplications": 3.81, "attention": 0.23, "memory bandwidth": 0.24, "tensor-parallel traffic": 1.48},
        {"matrix multiplications": 4.3, "attention": 0.23, "memory bandwidth": 0.24, "tensor-parallel traffic": 4.95},
    ),
    (  # 2 stages, 16 stages
        {"matrix multiplications": 3.9, "attention": 0.23, "pipeline messages": 0.02, "pipeline bubble": 0.5},
        {"matrix multiplications": 4.1, "attention": 0.23, "pipeline messages": 0.1, "pipeline bubble": 3.2},
    ),
    (  # TP 2 with replicas, TP 8 with two stages
        {"matrix multiplications": 3.7, "attention": 0.23, "tensor-parallel traffic": 0.3,
         "data-parallel traffic": 0.42},
        {"matrix multiplications": 4.2, "attention": 0.23, "tensor-parallel traffic": 2.6, "pipeline messages": 0.2,
         "pipeline bubble": 0.1, "data-parallel traffic": 0.02},
    ),
)  # fmt: skip


@formula(_PAIRS, "A difference says why; a share of one step alone does not.", asked="one of the parts' names")
def check_reason(quick: dict[str, float], slow: dict[str, float]):
    """The part of a step that makes the slow layout slower."""
    grown = {name: slow.get(name, 0.0) - quick.get(name, 0.0) for name in {*quick, *slow}}
    right = max(grown, key=grown.get)
    return right, [
        (lambda name: name not in grown, "it should return one of the parts' names"),
        ("matrix multiplications", "they take much of the slow step, and took nearly as much of the quick one"),
        (lambda name: name not in quick, "it has grown by the largest factor, from nothing. Seconds count"),
        (lambda _: True, f"{right} has grown by {grown[right]:.2f} s, more than any other part"),
    ]


@exercise("headroom")
def my_headroom(candidates, room, free):
    """First say who may stay, then what the quickest of these takes. Layouts within 3 % of it are equal as far as
    anybody can predict: what decides among them?"""
    fitting = [candidate for candidate in candidates if candidate[2] <= (1 - free) * room]
    quickest = min(seconds for _, seconds, _ in fitting)
    # within 3 % nobody can tell which is quicker: take the one that needs least
    near = [candidate for candidate in fitting if candidate[1] <= 1.03 * quickest]
    return min(near, key=lambda candidate: candidate[2])[0]


@exercise("reason")
def my_reason(quick, slow):
    """The largest part of the slow step may be as large in the quick one. Lay both steps beside each other, part by
    part; one that is missing takes no time."""
    # what is slow in both explains nothing: ask what has grown, in seconds
    return max({*quick, *slow}, key=lambda part: slow.get(part, 0) - quick.get(part, 0))
