"""The exercises of this chapter, and what checks an answer to each."""

import math
import random
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from pardemo import WireMeter, World
from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed

EXERCISES = {
    "sent": Exercise(
        "my_sent",
        "How many laps round the ring does each of the three take? In one lap a rank sends all parts of the tensor but "
        "its own.",
    ),
    "accuracy": Exercise(
        "my_accuracy",
        "What are the two whole numbers whose quotient is the accuracy? They can be counted on each rank, and counts "
        "can be added.",
    ),
}
TIMEOUT_S = 60
RANKS, VOCABULARY = 3, 512
MOST_BYTES = 4096  # of some numbers, with headers; the smallest logits are sixty times as large


def check_sent(function: Callable[[Sequence[tuple[str, int]], int], float]) -> str:
    """``function(calls, ranks)`` is what a rank sends on rings by calls of (kind, bytes of the whole tensor)."""
    generator = random.Random(fresh_seed())
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    one_by_one = [[(kind, 4800)] for kind in kinds]
    for calls in [*one_by_one, [(generator.choice(kinds), 480 * generator.randrange(1, 10**6)) for _ in range(20)]]:
        ranks = generator.choice((2, 4, 8))
        answer = call(function, list(calls), ranks)
        if isinstance(answer, bool) or not isinstance(answer, (int, float)) or not math.isfinite(answer):
            raise Mistake(f"It returned {answer!r}; it should return a number of bytes.")
        _compare_sent(answer, calls, ranks)
    return "That is the column of bytes of every meter in this chapter."


def _compare_sent(answer: float, calls: Sequence[tuple[str, int]], ranks: int) -> None:
    laps = [(2 if kind == "all-reduce" else 1) * nbytes for kind, nbytes in calls]
    share = (ranks - 1) / ranks
    right = sum(laps) * share
    if math.isclose(answer, right, rel_tol=1e-9):
        return
    one = calls[0]
    case = f"For one {one[0]} of {one[1]:,} bytes" if len(calls) == 1 else f"For {len(calls)} calls"
    mistakes = {
        sum(laps): "a rank does not send the part that it keeps: there is a factor (N−1)/N.",
        sum(nbytes for _, nbytes in calls)
        * share: "an all-reduce takes two laps: a reduce-scatter, then an all-gather.",
        sum(nbytes for _, nbytes in calls)
        * (ranks - 1): "the bytes are those of the whole tensor, of all ranks' parts.",
    }
    for value, hint in mistakes.items():
        if math.isclose(answer, value, rel_tol=1e-9):
            raise Mistake(f"{case} on {ranks} ranks: {hint}")
    raise Mistake(f"{case} on {ranks} ranks a rank sends {right:,.0f} bytes, not {answer:,.0f}.")


def check_accuracy(function: Callable[[torch.Tensor, torch.Tensor], float]) -> str:
    """``function(logits, targets)`` is, on every rank, the accuracy over all ranks' tokens, for a few bytes."""
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        results = world.run(_try_accuracy, function, fresh_seed())
    right = sum(right for _, right, _, _ in results) / sum(count for _, _, count, _ in results)
    means = sum(right / count for _, right, count, _ in results) / RANKS
    for rank, (answer, own, count, _) in enumerate(results):
        if isinstance(answer, bool) or not isinstance(answer, (int, float)):
            raise Mistake(f"Rank {rank} returned {answer!r}; it should return a number, such as 0.25.")
        if math.isclose(answer, right, abs_tol=1e-5):
            continue
        if math.isclose(answer, own / count, abs_tol=1e-5):
            raise Mistake(
                f"Rank {rank} returned {answer:.4f}, the accuracy of its own tokens; all ranks' is {right:.4f}."
            )
        if math.isclose(answer, means, abs_tol=1e-5):
            raise Mistake(
                f"Rank {rank} returned {answer:.4f}, the mean of the ranks' accuracies. The ranks have different "
                f"numbers of tokens: {', '.join(str(count) for _, _, count, _ in results)}."
            )
        raise Mistake(f"Rank {rank} returned {answer:.4f}; of all tokens {right:.4f} are right.")
    sent = max(sent for *_, sent in results)
    if sent > MOST_BYTES:
        raise Mistake(f"Right, but a rank sent {sent:,} bytes: count on each rank, and send the counts.")
    return "Right, also where ranks have different numbers of tokens, and whatever the size of the vocabulary."


def _try_accuracy(function: Callable[[torch.Tensor, torch.Tensor], float], seed: int) -> tuple[object, int, int, int]:
    """The answer, how many of this rank's tokens are right, how many there are, bytes that it sent."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed + rank)
    count = 128 * (rank + 1)
    logits = torch.randn(count, VOCABULARY, generator=generator)
    targets = torch.randint(VOCABULARY, (count,), generator=generator)
    known = torch.rand(count, generator=generator) < (rank + 1) / (RANKS + 1)
    targets = torch.where(known, logits.argmax(-1), targets)
    right = int((logits.argmax(-1) == targets).sum())
    with WireMeter() as wire:
        answer = function(logits, targets)
    return answer, right, count, wire.sent_bytes


def my_sent(calls, ranks):
    rings = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # laps round the ring
    return sum(rings[kind] * nbytes * (ranks - 1) / ranks for kind, nbytes in calls)


def my_accuracy(logits, targets):
    right = (logits.argmax(-1) == targets).sum()
    counts = torch.stack([right, torch.tensor(targets.numel(), device=right.device)])
    dist.all_reduce(counts)  # two numbers, however many logits there are
    return (counts[0] / counts[1]).item()
