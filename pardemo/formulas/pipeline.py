"""Pipelines in figures: p stages, m micro-batches, v chunks of layers per rank.

Sources: Huang et al. 2019, "GPipe" (arXiv 1811.06965, 2.3); Narayanan et al. 2019, "PipeDream" (SOSP '19, 3.2);
Narayanan et al. 2021 (arXiv 2104.04473, 2.2). GPipe states the bubble over all time, Megatron over ideal time.
Zero bubble: Qi et al. 2023 (arXiv 2401.10241), where the backward is B for the input's gradient and W for the weights'.
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


def idle(
    schedule: str, stages: int, micro_batches: int, forward_s: float, backward_s: float, weights_s: float | None = None
) -> float:
    """Seconds of a step in which a rank has nothing to do: what a step takes beyond m(F + B + W).

    GPipe and 1F1B (p−1)(F + B + W). ZB-H1 (p−1)(F + B − W) where W is none of the longest, as the paper has it; if W is
    longer than F or B, it cannot all be filled: (p−1)(F + B − min(F, B, W)). With F = B = W that is a third of 1F1B's.
    ZB-V, for F = B = W: (p−1)F/2. All of that is before a rank begins or after it has ended, which the paper does not
    count: to it this is 0.

    Args:
        forward_s: F of a rank's micro-batch (all its chunks). backward_s: B + W. weights_s: W, half of that when None.

    Raises:
        ValueError: an unknown schedule; fewer micro-batches than ZB-H1 (p) or ZB-V (2p − 1) needs to fill its
            pipeline; other times than ZB-V's.
    """
    _check(stages, micro_batches, 1)
    weights_s = backward_s / 2 if weights_s is None else weights_s
    input_s = backward_s - weights_s
    if schedule in ("gpipe", "one_f_one_b"):
        return (stages - 1) * (forward_s + backward_s)
    fills = {"zb_h1": stages, "zb_v": 2 * stages - 1}
    if schedule not in fills:
        raise ValueError(f"schedule must be gpipe, one_f_one_b, zb_h1 or zb_v, not {schedule!r}")
    if micro_batches < fills[schedule]:
        raise ValueError(
            f"{schedule} is full from {fills[schedule]} micro-batches on, not with {micro_batches}: chart the schedule"
        )
    if schedule == "zb_h1":
        return (stages - 1) * (forward_s + input_s - min(forward_s, input_s, weights_s))
    if not math.isclose(forward_s, input_s) or not math.isclose(forward_s, weights_s):
        raise ValueError("zb_v is made for F = B = W: with other times, chart the schedule")
    return (stages - 1) * forward_s / 2


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

    GPipe m; 1F1B min(p − rank, m); interleaved 2(p − rank − 1) + (v−1)·p + 1 of its smaller chunks, at most v·m. Those
    of which only the weights' gradients are still to do are held too: ZB-H1 min(p, m); ZB-V 2p of its half chunks.
    """
    _check(stages, micro_batches, chunks)
    _check_rank(rank, stages)
    if schedule == "gpipe":
        return micro_batches
    if schedule == "one_f_one_b":
        return min(stages - rank, micro_batches)
    if schedule == "interleaved":
        return min(2 * (stages - rank - 1) + (chunks - 1) * stages + 1, chunks * micro_batches)
    if schedule == "zb_h1":
        return min(stages, micro_batches)
    if schedule == "zb_v":
        return min(2 * stages, 2 * micro_batches, micro_batches + rank + 1)
    raise ValueError(f"schedule must be gpipe, one_f_one_b, interleaved, zb_h1 or zb_v, not {schedule!r}")


def boundary_bytes(
    rank: int, stages: int, micro_batches: int, activation_bytes: int, chunks: int = 1, v_shape: bool = False
) -> tuple[int, int]:
    """Bytes that a rank sends, and receives, in a step: activations onward, their gradients back.

    ``activation_bytes`` is one micro-batch's activation between two stages. Only the first stage of all has nobody
    before it and only the last nobody behind it. (2104.04473 3.2 counts b·s·h elements per micro-batch and direction.)
    In a ``v_shape`` of two chunks nothing travels where the V turns either.
    """
    _check(stages, micro_batches, chunks)
    _check_rank(rank, stages)
    if stages == 1:
        return 0, 0
    if v_shape:
        if chunks != 2:
            raise ValueError(f"a V has 2 chunks on each rank, not {chunks}")
        each = 1 if rank in (0, stages - 1) else 2  # of two activations and two gradients, on the ends one of each
        return (2 * each * micro_batches * activation_bytes,) * 2
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
