"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Callable, Sequence

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed

EXERCISES = {
    "crossing": Exercise(
        "my_crossing",
        "Write down the seconds of both ways, steps times computing plus bytes over B, and set them equal. Which of "
        "the two has the bytes only in some of its steps?",
    ),
    "order": Exercise(
        "my_order",
        "When does a ring have to leave a node, and when does it do so for nothing? Put the ranks of a node next to "
        "each other.",
    ),
}


def check_order(function: Callable[[Sequence[int]], Sequence[int]]) -> str:
    """``function(node_of)`` is an order of all ranks in which a ring goes from node to node as seldom as possible."""
    generator = random.Random(fresh_seed())
    cases = [[0, 1, 0, 1], [0, 0, 1, 1], [0, 0], [generator.randrange(4) for _ in range(16)]]
    for node_of in cases:
        order = call(function, list(node_of))
        if not isinstance(order, (list, tuple)) or sorted(order, key=str) != sorted(range(len(node_of)), key=str):
            raise Mistake(f"For nodes {node_of} it returned {order!r}; it should be a list with each rank once.")
        crossings = sum(node_of[a] != node_of[b] for a, b in zip(order, [*order[1:], order[0]], strict=True))
        nodes = len(set(node_of))
        fewest = nodes if nodes > 1 else 0
        if crossings > fewest:
            raise Mistake(
                f"For nodes {node_of} the ring {list(order)} crosses {crossings} times; {fewest} would do. "
                "(The last rank sends to the first one.)"
            )
    return "Each node is entered once and left once: that is what NCCL's rings do."


def check_crossing(function: Callable[..., float]) -> str:
    """``function(steps_each, steps_every, period, step_s, nbytes, ranks)`` is the bandwidth, in bytes/s, at which both
    ways to average take the same time."""
    generator = random.Random(fresh_seed())
    for _ in range(5):
        each, period, ranks = (
            generator.randrange(100, 1000),
            generator.choice((8, 50, 500)),
            generator.choice((3, 4, 64)),  # with 2 ranks a ring sends as much as the tensor has
        )
        every, step_s = int(each * generator.uniform(1.2, 3)), generator.uniform(0.01, 2)
        nbytes = generator.randrange(10**6, 10**10)
        answer = call(function, each, every, period, step_s, nbytes, ranks)
        if isinstance(answer, bool) or not isinstance(answer, (int, float)):
            raise Mistake(f"It returned {answer!r}; it should return a number of bytes a second.")
        _compare(answer, each, every, period, step_s, nbytes, ranks)
    return "Below that bandwidth averaging less often is faster, above it averaging in each step."


def _compare(answer: float, each: int, every: int, period: int, step_s: float, nbytes: int, ranks: int) -> None:
    right = _crossing(each, every, period, step_s, 2 * (ranks - 1) / ranks * nbytes)
    if abs(answer - right) <= 1e-6 * abs(right):
        return
    case = f"For {each} and {every} steps, period {period}, {step_s:.2f} s, {nbytes:,} B, {ranks} ranks"
    mistakes = {
        8 * right: "that is bits a second; bytes are asked for.",
        _crossing(each, every, period, step_s, nbytes): "a ring all-reduce sends 2(N−1)/N times the tensor, not once.",
        _crossing(each, every, 1, step_s, 2 * (ranks - 1) / ranks * nbytes): "only every period-th step is an average.",
    }
    for value, hint in mistakes.items():
        if abs(answer - value) <= 1e-6 * abs(value):
            raise Mistake(f"{case}: {hint}")
    raise Mistake(f"{case}: {answer:.4g} B/s is not where both take the same time; {right:.4g} is.")


def _crossing(each: int, every: int, period: int, step_s: float, sent: float) -> float:
    return sent * (each - every / period) / (step_s * (every - each))


def my_order(node_of):
    # ranks of a node stand next to each other: each node is entered once and left once
    return sorted(range(len(node_of)), key=lambda rank: node_of[rank])


def my_crossing(steps_each, steps_every, period, step_s, nbytes, ranks):
    sent = 2 * (ranks - 1) / ranks * nbytes
    # steps_each · (step_s + sent / B) = steps_every · (step_s + sent / (period · B)), solved for B
    return sent * (steps_each - steps_every / period) / (step_s * (steps_every - steps_each))
