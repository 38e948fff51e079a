"""Zero-bubble schedules: the weights' gradients, which no other rank waits for, fill what would be idle.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), whose B is :class:`BackwardInput` here;
the V-shaped placement also in Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).

- :func:`zb_h1` (2.1): 1F1B's order; ranks further down put more weights' gradients off, so that all ranks hold p
  micro-batches, as 1F1B's first one does, and the bubble is (p−1)(F + B − W): a third of 1F1B's where F = B = W.
- :func:`zb_v` (6): two chunks on each rank in a :func:`v_shape`. Made for F = B = W: then, from 2p − 1 micro-batches
  on, no rank is idle between its first computation and its last, with 1F1B's memory. From the first rank's begin to the
  last one's end there are (p−1)·F/2 more, in which ranks have not begun or have ended.

All of them count a micro-batch as held until its weights' gradients are there. In the paper it weighs less once B has
run (M_W < M_B). Here it weighs more: autograd lets go of nothing in between, and the gradients that arrived at the
layers are kept as well (:mod:`.split`); :func:`most_held` takes that ratio. Of an MLP's 18 widths it makes 28, and
ZB-H1's last rank held 1.6 times what 1F1B's first one did.
"""

from collections.abc import Iterator

from pardemo.pipeline_parallel.instructions import BackwardInput, BackwardWeight, Compute, Forward
from pardemo.pipeline_parallel.schedules import ScheduleError, placed, v_shape


def zb_h1(rank: int, ranks: int, micro_batches: int) -> Iterator[Compute]:
    """ZB-H1: rank r has r weights' gradients to do, at any time after 1F1B's beginning, and does them in the end."""
    ahead, late = min(ranks - rank - 1, micro_batches), min(rank, micro_batches)
    for k in range(ahead):
        yield Forward(rank, k)
    for k in range(micro_batches):
        if ahead + k < micro_batches:
            yield Forward(rank, ahead + k)
        yield BackwardInput(rank, k)
        if k >= late:
            yield BackwardWeight(rank, k - late)
    for k in range(micro_batches - late, micro_batches):
        yield BackwardWeight(rank, k)


@placed(v_shape)
def zb_v(rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> Iterator[Compute]:
    """ZB-V: forwards down the V until the first comes up again, then both arms by turns, and what is put off last.

    Raises:
        ScheduleError: another number of chunks than 2.
    """
    if chunks != 2:
        raise ScheduleError(f"ZB-V has 2 chunks on each rank, one on either arm of its V, not {chunks}")
    for step in _whole_v(rank, ranks, max(micro_batches, 2 * ranks - 1)):
        if step.micro_batch < micro_batches:  # of a batch too small to fill the V, what there is
            yield step


def _whole_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Compute]:
    down, up = rank, 2 * ranks - 1 - rank  # the rank's two stages
    done: dict[tuple[type, int], int] = {}

    def turn(kind: type, stage: int) -> Compute:
        done[kind, stage] = done.get((kind, stage), 0) + 1
        return kind(stage, done[kind, stage] - 1)

    for _ in range(2 * (ranks - rank) - 1):
        yield turn(Forward, down)
    for _ in range(rank):
        yield turn(Forward, up)
        yield turn(Forward, down)
    for _ in range(ranks - rank):
        yield turn(Forward, up)
        yield turn(BackwardInput, up)
        yield turn(BackwardWeight, up)
    for _ in range(ranks, micro_batches):
        if done[Forward, down] < micro_batches:
            yield turn(Forward, down)
        yield turn(BackwardInput, down)
        yield turn(BackwardWeight, down)
        yield turn(Forward, up)
        yield turn(BackwardInput, up)
        yield turn(BackwardWeight, up)
    for _ in range(rank):
        yield turn(BackwardInput, down)
        yield turn(BackwardInput, up)
    for _ in range(ranks - rank):
        yield turn(BackwardInput, down)
        yield turn(BackwardWeight, down)
    for stage in (up, down):
        while done.get((BackwardWeight, stage), 0) < micro_batches:
            yield turn(BackwardWeight, stage)
