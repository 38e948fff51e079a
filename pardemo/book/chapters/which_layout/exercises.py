"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Callable, Sequence

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed

EXERCISES = {
    "headroom": Exercise(
        "my_headroom",
        "First say who may stay, then what the quickest of these takes. Layouts within 3 % of it are equal as far as "
        "anybody can predict: what decides among them?",
    ),
    "reason": Exercise(
        "my_reason",
        "The largest part of the slow step may be as large in the quick one. Lay both steps beside each other, part by "
        "part; one that is missing takes no time.",
    ),
}

NEAR = 1.03  # layouts within 3 % of the quickest are as quick
Candidate = tuple[str, float, float]  # layout, seconds of a step, bytes of a GPU


def check_headroom(function: Callable[[Sequence[Candidate], float, float], str]) -> str:
    """``function(candidates, room, free)`` is the layout to take: fits with a share ``free`` left, quick, and small."""
    generator = random.Random(fresh_seed())
    for free in (0.1, 0.0, 0.3, 0.5):
        room = generator.choice((40e9, 80e9, 190e9))
        candidates = _candidates(generator, room, free)
        answer = call(function, list(candidates), room, free)
        right = _chosen(candidates, room, free)
        if answer == right[0]:
            continue
        case = f"With {room / 1e9:.0f} GB of room and {free:.0%} to stay free"
        by_name = {name: (seconds, nbytes) for name, seconds, nbytes in candidates}
        if answer not in by_name:
            raise Mistake(f"{case} it returned {answer!r}; it should return the name of one of the candidates.")
        seconds, nbytes = by_name[answer]
        free_share = 1 - nbytes / room
        if free_share < free:
            raise Mistake(f"{case}: {answer} leaves {free_share:.0%}, of the room and not of what it takes itself.")
        if seconds > NEAR * right[1]:
            raise Mistake(f"{case}: {answer} takes {seconds:.2f} s; {right[0]} fits as well, with {right[1]:.2f} s.")
        raise Mistake(
            f"{case}: {answer} and {right[0]} are within 3 % of the quickest; the second takes {right[2] / 1e9:.0f} GB "
            f"instead of {nbytes / 1e9:.0f}."
        )
    return "Who takes the smaller of two equally quick layouts has room for the day on which something else grows."


def _candidates(generator: random.Random, room: float, free: float) -> list[Candidate]:
    """The quickest do not fit, then one that fits and a smaller one within 3 % of it, then slower ones."""
    most, quick = (1 - free) * room, generator.uniform(4, 9)
    shares = ((0.8, 1.15), (0.9, 1.02), (1.0, 0.99), (1.02, 0.7), (1.1, 0.5), (1.6, 0.2))
    costs = [(quick * longer, most * share) for longer, share in shares]
    names = generator.sample([f"TP{t} PP{p}" for t in (1, 2, 4, 8) for p in (1, 2, 4, 8)], len(costs))
    candidates = [(name, *cost) for name, cost in zip(names, costs, strict=True)]
    generator.shuffle(candidates)
    return candidates


def _chosen(candidates: Sequence[Candidate], room: float, free: float) -> Candidate:
    fitting = [candidate for candidate in candidates if candidate[2] <= (1 - free) * room]
    quickest = min(candidate[1] for candidate in fitting)
    return min(
        (candidate for candidate in fitting if candidate[1] <= NEAR * quickest), key=lambda candidate: candidate[2]
    )


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


def check_reason(function: Callable[[dict[str, float], dict[str, float]], str]) -> str:
    """``function(quick, slow)`` is the part of a step that makes the slow layout slower."""
    for quick, slow in _PAIRS:
        answer = call(function, dict(quick), dict(slow))
        grown = {name: slow.get(name, 0.0) - quick.get(name, 0.0) for name in {*quick, *slow}}
        right = max(grown, key=grown.get)
        if answer == right:
            continue
        case = f"From {sum(quick.values()):.1f} s to {sum(slow.values()):.1f} s"
        if answer not in grown:
            raise Mistake(f"{case} it returned {answer!r}; it should return one of the parts' names.")
        if answer == "matrix multiplications":
            raise Mistake(f"{case}: {answer} takes much of the slow step, and took nearly as much of the quick one.")
        if answer not in quick:
            raise Mistake(f"{case}: {answer} has grown by the largest factor, from nothing. Seconds count.")
        raise Mistake(f"{case}: {answer} has grown by {grown[answer]:.2f} s, {right} by {grown[right]:.2f} s.")
    return "A difference says why; a share of one step alone does not."


def my_headroom(candidates, room, free):
    fitting = [candidate for candidate in candidates if candidate[2] <= (1 - free) * room]
    quickest = min(seconds for _, seconds, _ in fitting)
    # within 3 % nobody can tell which is quicker: take the one that needs least
    near = [candidate for candidate in fitting if candidate[1] <= 1.03 * quickest]
    return min(near, key=lambda candidate: candidate[2])[0]


def my_reason(quick, slow):
    # what is slow in both explains nothing: ask what has grown, in seconds
    return max({*quick, *slow}, key=lambda part: slow.get(part, 0) - quick.get(part, 0))
