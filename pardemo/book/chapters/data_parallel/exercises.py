"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import POINT_TO_POINT, Mistake, compare_tensors, exercise, fresh_seed, on_ranks
from pardemo.meters import CallMeter, WireMeter
from pardemo.small_models import gpt

RANKS = 4
NBYTES = 4 << 20


def check_all_reduce(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """``function(tensor)`` sums over the ranks by sends and receives; no rank may send more than 2(N−1)/N·S.

    A rank may not send all of it to one neighbour: that is the chapter's own ring, with its 2(N−1) rounds.
    """
    sent, largest_shares, calls = zip(*on_ranks(RANKS, _try_all_reduce, function, fresh_seed()), strict=True)
    best = 2 * (RANKS - 1) / RANKS
    if max(sent) > best * 1.01:
        one_talks = max(sent) > 1.8 * min(sent)
        hint = "that is a parameter server: one rank does all the talking" if one_talks else (
            "whole tensors travel where a chunk of S/N would do"
        )  # fmt: skip
        raise Mistake(f"The sum is right, but a rank sends {max(sent):.2f} S; {best:g} S is enough: {hint}.")
    if min(sent) < best * 0.98:  # whatever the way, N ranks have to send 2(N−1)·S
        raise Mistake(
            f"The sum is right, but a rank sends {min(sent):.2f} S: let the numbers travel between the ranks."
        )
    if others := sorted(set().union(*calls) - POINT_TO_POINT):
        raise Mistake(f"Right, but {others[0]} did it for you: build it of dist.send and dist.recv.")
    if max(largest_shares) > 0.95:
        raise Mistake(
            "The sum and the bytes are right, but each rank talks to its neighbour alone: that is the ring, with "
            f"{2 * (RANKS - 1)} rounds. Send each chunk straight to the rank that adds it up; two rounds are enough."
        )
    return f"Right, and no rank sends more than {max(sent):.3f} S: the least there is, 2(N−1)/N·S = {best:g} S."


def _try_all_reduce(function: Callable, seed: int) -> str | tuple[float, float, set[str]]:
    """What this rank sent, in S, the largest part of it that one peer got, and the collectives that it called."""
    tensors = [_whole_numbers(seed + rank) for rank in range(dist.get_world_size())]
    total, mean = sum(tensors), sum(tensors) / len(tensors)
    dist.barrier()
    with WireMeter() as wire, CallMeter() as calls:
        result = function(tensors[dist.get_rank()])
    mistakes = [(mean, "you returned the mean; here the sum is asked for.")]
    if problem := compare_tensors(result, total, mistakes, "its elements are not the sums"):
        return problem
    sent_to_peers = [sent for sent, _ in wire.by_rank().values()] if wire.evidence == "wire" else []
    largest_share = max(sent_to_peers, default=0) / max(1, sum(sent_to_peers))
    return wire.sent_bytes / NBYTES, largest_share, set(calls.counts)


def _whole_numbers(seed: int) -> torch.Tensor:
    """Whole numbers in fp32, below 97: their sum is exact in any order."""
    return torch.randint(97, (NBYTES // 4,), generator=torch.Generator().manual_seed(seed)).float()


def check_unequal_shards(function: Callable[[torch.Tensor, int], torch.Tensor]) -> str:
    """``function(gradient, samples)`` combines the ranks' mean gradients into the whole batch's."""
    on_ranks(RANKS, _try_unequal, function, fresh_seed())
    return "Each sample counts the same, whichever rank it was on."


def _try_unequal(function: Callable, seed: int) -> str:
    rank, samples = dist.get_rank(), [1, 2, 5, 8]
    gradients = [gpt.numbers(1000, seed=seed + rank) for rank in range(RANKS)]
    right = sum(g * n for g, n in zip(gradients, samples, strict=True)) / sum(samples)
    of_means = (
        "that is the mean of the means: the one sample of rank 0 counts as much as the eight of rank 3. Weight each "
        "gradient by its number of samples."
    )
    result = function(gradients[rank].clone(), samples[rank])
    mistakes = [(sum(gradients) / RANKS, of_means)]
    return compare_tensors(result, right, mistakes, "this is not the whole batch's mean gradient")


@exercise("all_reduce")
def my_all_reduce(tensor):
    """Cut the tensor into as many chunks as there are ranks, and make each rank responsible for one of them. Who
    needs to hear of chunk 2 before it is summed, and who afterwards?"""
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


@exercise("unequal_shards")
def my_combine(gradient, samples):
    """The mean over one sample must not weigh as much as the mean over eight. Besides the gradients, what else do
    the ranks have to add up?"""
    total = torch.tensor([float(samples)])
    dist.all_reduce(total)
    # A mean times its number of samples is a sum, and sums can be added.
    gradient = gradient * samples / total
    dist.all_reduce(gradient)
    return gradient
