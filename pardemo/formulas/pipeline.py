"""Computes idle time, memory and messages of pipelines: p stages, m micro-batches, v chunks of layers per rank.

Sources: Huang et al. 2019, "GPipe" (arXiv 1811.06965, 2.3); Narayanan et al. 2019, "PipeDream" (SOSP '19, 3.2);
Narayanan et al. 2021 (arXiv 2104.04473, 2.2). GPipe states the bubble over all time, Megatron over ideal time.
Zero bubble: Qi et al. 2023 (arXiv 2401.10241), where the backward is B for the input's gradient and W for the weights'.
DualPipeV: the repository deepseek-ai/DualPipe, where B is the whole backward.
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


def dual_pipe_v_idle(
    ranks: int,
    forward_s: float,
    backward_s: float,
    weights_s: float,
    pair_s: float | None = None,
    puts_off: bool = True,
) -> float:
    """Seconds of a step in which the last rank of DualPipeV has nothing to do, by its timetable.

    Times are those of one chunk: F, the whole backward B = I + W, and F&B of a forward and a backward that run together
    as one computation. Where weights' gradients are put off at the end of a step, as in deepseek-ai/DualPipe and torch,
    (p−1)(F&B + B − 3W), and where they are not, (p−1)(F&B + B − W); of both min(F, (p−1)(I − F)) is saved, since the
    last rank takes its first pair one after the other. Derived from timetables of 2 to 8 ranks, which the tests hold
    it to.

    Args:
        forward_s: F. backward_s: B. weights_s: W, where it is put off at most B/2.
        pair_s: F&B, from the longer of the two to both; None: they run one after the other, and each result is handed
            on at once, which is as if F&B were the longer of the two.
        puts_off: whether the end of a step puts weights' gradients off.

    Raises:
        ValueError: times that the timetable has no such formula for.
    """
    input_s, longer = backward_s - weights_s, max(forward_s, backward_s)
    pair_s = longer if pair_s is None else pair_s
    if puts_off and weights_s > input_s:
        raise ValueError("with W longer than I, what is put off is late itself: chart the schedule")
    if not longer <= pair_s <= forward_s + backward_s:
        raise ValueError(f"F&B takes from {longer:g} to {forward_s + backward_s:g}, the two together, not {pair_s:g}")
    saved = min(forward_s, (ranks - 1) * (input_s - forward_s))
    return (ranks - 1) * (pair_s + backward_s - (3 if puts_off else 1) * weights_s) - saved


def deepseek_bubble(stages: int, backward_s: float, weights_s: float, pair_s: float) -> float:
    """DualPipe's and DualPipeV's bubble in the README of deepseek-ai/DualPipe: (PP/2 − 1)(F&B + B − 3W).

    ``stages`` is its PP, which counts stages: DualPipeV has two on each rank. Times of one chunk. (arXiv 2412.19437,
    table 2, has it for DualPipe.)
    """
    return (stages / 2 - 1) * (pair_s + backward_s - 3 * weights_s)


def mindspeed_bubble(ranks: int, forward_s: float, backward_s: float, weights_s: float, pair_s: float) -> float:
    """DualPipeV's bubble in Ascend/MindSpeed's docs/zh/features/dualpipev.md: (PP − 1)(F&B + B − W) − F.

    ``ranks`` is its PP, which counts ranks. Times of one chunk. Its timetable does not put weights' gradients off at
    the end of a step, unless it is told to.
    """
    return (ranks - 1) * (pair_s + backward_s - weights_s) - forward_s


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
        tensors = 1 if rank in (0, stages - 1) else 2  # of two activations and two gradients, on the ends one of each
        return (2 * tensors * micro_batches * activation_bytes,) * 2
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
