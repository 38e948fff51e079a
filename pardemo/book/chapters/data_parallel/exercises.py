"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import POINT_TO_POINT, Exercise, Mistake, fresh_seed
from pardemo.meters import CallMeter, WireMeter
from pardemo.small_models import gpt
from pardemo.world import World

EXERCISES = {
    "all_reduce": Exercise(
        "my_all_reduce",
        "Cut the tensor into as many chunks as there are ranks, and make each rank responsible for one of them. Who "
        "needs to hear of chunk 2 before it is summed, and who afterwards?",
    ),
    "unequal_shards": Exercise(
        "my_combine",
        "The mean over one sample must not weigh as much as the mean over eight. Besides the gradients, what else do "
        "the ranks have to add up?",
    ),
}

RANKS = 4
NBYTES = 4 << 20
TIMEOUT_S = 30


def check_all_reduce(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """``function(tensor)`` sums over the ranks by sends and receives; no rank may send more than 2(N−1)/N·S.

    A rank may not send all of it to one neighbour: that is the chapter's own ring, with its 2(N−1) rounds.
    """
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        results = world.run(_try_all_reduce, function, fresh_seed())
    for rank, attempt in enumerate(results):
        if attempt.problem:
            raise Mistake(f"On rank {rank} {attempt.problem}")
    sent = [attempt.sent_bytes / NBYTES for attempt in results]
    best = 2 * (RANKS - 1) / RANKS
    worst = max(range(RANKS), key=sent.__getitem__)
    if sent[worst] > best * 1.01:
        hint = (
            "that is a parameter server: one rank does all the talking"
            if max(sent) > 1.8 * min(sent)
            else "whole tensors travel where a chunk of S/N would do"
        )
        raise Mistake(f"The sum is right, but rank {worst} sends {sent[worst]:.2f} S; {best:g} S is enough: {hint}.")
    if min(sent) < best * 0.98:  # whatever the way, N ranks have to send 2(N−1)·S
        raise Mistake(
            f"The sum is right, but a rank sends {min(sent):.2f} S: let the numbers travel between the ranks."
        )
    if calls := sorted({name for attempt in results for name in attempt.calls}):
        raise Mistake(f"Right, but {calls[0]} did it for you: build it of dist.send and dist.recv.")
    if max(attempt.largest_share for attempt in results) > 0.95:
        raise Mistake(
            "The sum and the bytes are right, but each rank talks to its neighbour alone: that is the ring, with "
            f"{2 * (RANKS - 1)} rounds. Send each chunk straight to the rank that adds it up; two rounds are enough."
        )
    return f"Right, and no rank sends more than {max(sent):.3f} S: the least there is, 2(N−1)/N·S = {best:g} S."


class _Attempt(NamedTuple):
    """One rank's run of a reader's function. ``largest_share``: of the bytes sent, those to the peer that got most."""

    problem: str
    sent_bytes: int = 0
    largest_share: float = 0.0
    calls: frozenset[str] = frozenset()


def _try_all_reduce(function: Callable, seed: int) -> _Attempt:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [_whole_numbers(seed + r) for r in range(size)]
    expected = sum(tensors)
    dist.barrier()
    with WireMeter() as wire, CallMeter() as calls:
        result = function(tensors[rank])
    sent_to_peers = [sent for sent, _ in wire.by_rank().values()] if wire.evidence == "wire" else []
    largest_share = max(sent_to_peers, default=0) / max(1, sum(sent_to_peers))
    if result is None:
        return _Attempt("your function returned nothing; it should return the summed tensor.")
    if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
        got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        return _Attempt(f"it should return a tensor of shape {tuple(expected.shape)}, not {got}.")
    result = result.detach().to(expected.dtype)
    if torch.equal(result, expected):
        return _Attempt("", wire.sent_bytes, largest_share, frozenset(set(calls.counts) - POINT_TO_POINT))
    share_right = (result == expected).float().mean().item()
    if torch.allclose(result, expected / size):
        return _Attempt("you returned the mean; here the sum is asked for.")
    return _Attempt(f"only {share_right:.0%} of the elements hold the sum.")


def _whole_numbers(seed: int) -> torch.Tensor:
    """Whole numbers in fp32, below 97: their sum is exact in any order."""
    return torch.randint(97, (NBYTES // 4,), generator=torch.Generator().manual_seed(seed)).float()


def check_unequal_shards(function: Callable[[torch.Tensor, int], torch.Tensor]) -> str:
    """``function(gradient, samples)`` combines the ranks' mean gradients into the whole batch's."""
    samples, seed = [1, 2, 5, 8], fresh_seed()
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        results = world.run(_try_unequal, function, samples, seed)
    gradients = [gpt.numbers(1000, seed=seed + rank) for rank in range(RANKS)]
    want = sum(g * n for g, n in zip(gradients, samples, strict=True)) / sum(samples)
    plain = sum(gradients) / RANKS
    for rank, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise Mistake(f"On rank {rank} it returned {type(result).__name__}; it should return the gradient.")
        result = result.to(want.dtype)
        if result.shape == want.shape and torch.allclose(result, want, atol=1e-6):
            continue
        if result.shape == want.shape and torch.allclose(result, plain, atol=1e-6):
            raise Mistake(
                "That is the mean of the means: the one sample of rank 0 counts as much as the eight of rank 3. "
                "Weight each gradient by its number of samples."
            )
        raise Mistake(f"On rank {rank} the result is not the whole batch's mean gradient.")
    return "Each sample counts the same, whichever rank it was on."


def _try_unequal(function: Callable, samples: list[int], seed: int):
    rank = dist.get_rank()
    return function(gpt.numbers(1000, seed=seed + rank), samples[rank])


def my_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.chunk(n)  # views: writing to them writes to tensor
    others = [r for r in range(n) if r != rank]

    # First round: chunk r goes straight to rank r, which adds up what it gets.
    sends = [dist.isend(chunks[r].clone(), r) for r in others]
    received = torch.empty_like(chunks[rank])
    for r in others:
        dist.recv(received, r)
        chunks[rank].add_(received)
    for send in sends:
        send.wait()

    # Second round: everyone hands its finished chunk to all others.
    sends = [dist.isend(chunks[rank], r) for r in others]
    for r in others:
        dist.recv(chunks[r], r)
    for send in sends:
        send.wait()
    return tensor


def my_combine(gradient, samples):
    total = torch.tensor([float(samples)])
    dist.all_reduce(total)
    # A mean times its number of samples is a sum, and sums can be added.
    gradient = gradient * samples / total
    dist.all_reduce(gradient)
    return gradient
