"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Callable, Iterator, Sequence

from pardemo.book.page.exercises import Mistake, call, exercise, formula, fresh_seed


def check_order(function: Callable[[Sequence[int]], Sequence[int]]) -> str:
    """``function(node_of)`` is an order of all ranks in which a ring goes from node to node as seldom as possible."""
    generator = random.Random(fresh_seed())
    for node_of in ([0, 1, 0, 1], [0, 0, 1, 1], [0, 0], [generator.randrange(4) for _ in range(16)]):
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


def _jobs(draw: random.Random) -> Iterator[tuple]:
    for _ in range(5):
        each, ranks = draw.randrange(100, 1000), draw.choice((3, 4, 64))  # a ring of 2 sends what the tensor has
        every, period = int(each * draw.uniform(1.2, 3)), draw.choice((8, 50, 500))
        yield each, every, period, draw.uniform(0.01, 2), draw.randrange(10**6, 10**10), ranks


@formula(
    _jobs,
    "Below that bandwidth averaging less often is faster, above it averaging in each step.",
    unit="bytes a second",
)
def check_crossing(steps_each: int, steps_every: int, period: int, step_s: float, nbytes: int, ranks: int):
    """The bandwidth, in bytes/s, at which both ways to average take the same time."""

    def crossing(sent: float, period: int) -> float:
        return sent * (steps_each - steps_every / period) / (step_s * (steps_every - steps_each))

    sent = 2 * (ranks - 1) / ranks * nbytes
    return crossing(sent, period), [
        (8 * crossing(sent, period), "that is bits a second"),
        (crossing(nbytes, period), "a ring all-reduce sends 2(N−1)/N times the tensor, not once"),
        (crossing(sent, 1), "only every period-th step is an average"),
    ]


@exercise("order")
def my_order(node_of):
    """When does a ring have to leave a node, and when does it do so for nothing? Put the ranks of a node next to
    each other."""
    # ranks of a node stand next to each other: each node is entered once and left once
    return sorted(range(len(node_of)), key=lambda rank: node_of[rank])


@exercise("crossing")
def my_crossing(steps_each, steps_every, period, step_s, nbytes, ranks):
    """Write down the seconds of both ways, steps times computing plus bytes over B, and set them equal. Which of the
    two has the bytes only in some of its steps?"""
    sent = 2 * (ranks - 1) / ranks * nbytes
    # steps_each · (step_s + sent / B) = steps_every · (step_s + sent / (period · B)), solved for B
    return sent * (steps_each - steps_every / period) / (step_s * (steps_every - steps_each))
