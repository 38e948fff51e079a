"""The exercises of this chapter, and what checks an answer to each."""

import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from pardemo import WireMeter
from pardemo.book.page.exercises import Mistake, exercise, formula, fresh_seed, on_ranks

RANKS, VOCABULARY = 3, 512
MOST_BYTES = 4096  # of some numbers, with headers; the smallest logits are sixty times as large


def _lists_of_calls(draw: random.Random) -> Iterator[tuple[list[tuple[str, int]], int]]:
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    for calls in [[(kind, 4800)] for kind in kinds]:
        yield calls, draw.choice((4, 8))  # with two ranks, mistakes give the same bytes
    yield [(draw.choice(kinds), 480 * draw.randrange(1, 10**6)) for _ in range(20)], draw.choice((2, 4, 8))


@formula(_lists_of_calls, "That is the column of bytes of every meter in this chapter.", unit="bytes")
def check_sent(calls: Sequence[tuple[str, int]], ranks: int):
    """Checks what a rank sends on rings by calls of (kind, bytes of the whole tensor)."""
    once = sum(nbytes for _, nbytes in calls)
    laps = sum((2 if kind == "all-reduce" else 1) * nbytes for kind, nbytes in calls)
    share = (ranks - 1) / ranks
    return laps * share, [
        (laps, "a rank does not send the part that it keeps: there is a factor (N−1)/N"),
        (once * share, "an all-reduce takes two laps: a reduce-scatter, then an all-gather"),
        (once * (ranks - 1), "the bytes are those of the whole tensor, of all ranks' parts"),
    ]


def check_accuracy(function: Callable[[torch.Tensor, torch.Tensor], float]) -> str:
    """``function(logits, targets)`` is, on every rank, the accuracy over all ranks' tokens, for a few bytes."""
    answers, rights, counts, sent = zip(*on_ranks(RANKS, _try_accuracy, function, fresh_seed()), strict=True)
    right = sum(rights) / sum(counts)
    of_ranks = [right / count for right, count in zip(rights, counts, strict=True)]
    for rank, answer in enumerate(answers):
        if math.isclose(answer, right, abs_tol=1e-5):
            continue
        hint = ""
        if math.isclose(answer, of_ranks[rank], abs_tol=1e-5):
            hint = " That is the accuracy of its own tokens."
        elif math.isclose(answer, sum(of_ranks) / RANKS, abs_tol=1e-5):
            hint = (
                " That is the mean of the ranks' accuracies. The ranks have different numbers of tokens: "
                f"{', '.join(map(str, counts))}."
            )
        raise Mistake(f"Rank {rank} returned {answer:.4f}; of all tokens {right:.4f} are right.{hint}")
    if max(sent) > MOST_BYTES:
        raise Mistake(f"Right, but a rank sent {max(sent):,} bytes: count on each rank, and send the counts.")
    return "Right, also where ranks have different numbers of tokens, and whatever the size of the vocabulary."


def _try_accuracy(function: Callable, seed: int) -> str | tuple[float, int, int, int]:
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
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        return f"it returned {answer!r}; it should return a number, such as 0.25."
    return answer, right, count, wire.sent_bytes


@exercise("sent")
def my_sent(calls, ranks):
    """How many laps round the ring does each of the three take? In one lap a rank sends all parts of the tensor but
    its own."""
    rings = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}  # laps round the ring
    return sum(rings[kind] * nbytes * (ranks - 1) / ranks for kind, nbytes in calls)


@exercise("accuracy")
def my_accuracy(logits, targets):
    """What are the two whole numbers whose quotient is the accuracy? They can be counted on each rank, and counts
    can be added."""
    right = (logits.argmax(-1) == targets).sum()
    counts = torch.stack([right, torch.tensor(targets.numel(), device=right.device)])
    dist.all_reduce(counts)  # two numbers, however many logits there are
    return (counts[0] / counts[1]).item()
