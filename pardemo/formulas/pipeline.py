"""Pipelines in figures: p stages, m micro-batches, v chunks of layers per rank.

Sources: Huang et al. 2019, "GPipe" (arXiv 1811.06965, §2.3); Narayanan et al. 2019, "PipeDream" (SOSP '19, §3.2);
Narayanan et al. 2021 (arXiv 2104.04473, §2.2). GPipe states the bubble over all time, Megatron over ideal time.
"""

import math


def bubble_of_total(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time over all time: (p−1)/(v·m + p−1). GPipe's (K−1)/(M + K−1) for v = 1."""
    _check(stages, micro_batches, chunks)
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def bubble_of_ideal(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time over the time of the computation alone: (p−1)/(v·m), as Megatron states it."""
    _check(stages, micro_batches, chunks)
    return (stages - 1) / (chunks * micro_batches)


def makespan(stages: int, micro_batches: int, forward_s: float, backward_s: float, chunks: int = 1) -> float:
    """Seconds of a step without communication, from a rank's times for a micro-batch: ideal time and bubble."""
    ideal = micro_batches * (forward_s + backward_s)
    return ideal * (1 + bubble_of_ideal(stages, micro_batches, chunks))


def micro_batches_for(stages: int, share: float, chunks: int = 1) -> int:
    """The least m whose bubble is at most ``share`` of all time.

    Raises:
        ValueError: no m reaches it: a share of 0 with more than one stage.
    """
    _check(stages, 1, chunks)
    if stages == 1:
        return 1
    if not 0 < share < 1:
        raise ValueError(f"the bubble shrinks with m and never vanishes: ask for a share between 0 and 1, not {share}")
    return max(1, math.ceil((stages - 1) * (1 - share) / (share * chunks) - 1e-9))


def in_flight(schedule: str, rank: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Micro-batches (of one chunk each) whose activations a rank holds at most.

    GPipe m; 1F1B min(p − rank, m); interleaved 2(p − rank − 1) + (v−1)·p + 1 of its smaller chunks, at most v·m.
    """
    _check(stages, micro_batches, chunks)
    _check_rank(rank, stages)
    if schedule == "gpipe":
        return micro_batches
    if schedule == "one_f_one_b":
        return min(stages - rank, micro_batches)
    if schedule == "interleaved":
        return min(2 * (stages - rank - 1) + (chunks - 1) * stages + 1, chunks * micro_batches)
    raise ValueError(f"schedule must be gpipe, one_f_one_b or interleaved, not {schedule!r}")


def boundary_bytes(
    rank: int, stages: int, micro_batches: int, activation_bytes: int, chunks: int = 1
) -> tuple[int, int]:
    """Bytes that a rank sends, and receives, in a step: activations onward, their gradients back.

    ``activation_bytes`` is one micro-batch's activation between two stages. Only the first stage of all has nobody
    before it and only the last nobody behind it. (2104.04473 §3.2 counts b·s·h elements per micro-batch and direction.)
    """
    _check(stages, micro_batches, chunks)
    _check_rank(rank, stages)
    if stages == 1:
        return 0, 0
    onward = chunks - (rank == stages - 1)  # boundaries behind this rank's stages
    back = chunks - (rank == 0)  # and before them
    sent = (onward + back) * micro_batches * activation_bytes
    return sent, sent


def _check(stages: int, micro_batches: int, chunks: int) -> None:
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def _check_rank(rank: int, stages: int) -> None:
    if not 0 <= rank < stages:
        raise ValueError(f"rank {rank} is not one of the {stages} ranks 0 to {stages - 1}")
