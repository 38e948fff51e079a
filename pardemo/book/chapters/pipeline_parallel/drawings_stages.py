"""A pipeline: the layers of each rank, what two ranks send each other, and two ways to give each rank two stages."""

from itertools import pairwise

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, KEPT, rank_colour

_SENT = DONE["communication"]
_LEFT, _GAP = 104, 44  # where the first rank begins, and the way to the next


def pipeline_stages(ranks: int = 4) -> Drawing:
    """A model cut into stages of two layers: activations are sent to the next rank, their gradients back.

    Args:
        ranks: p, from 2 to 4.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 4:
        raise ValueError(f"a pipeline of 2 to 4 ranks can be drawn, not of {ranks}")
    canvas = Canvas(640, 282)
    wide = (632 - _LEFT - (ranks - 1) * _GAP) / ranks
    canvas.text(40, 16, "batch", size=18, bold=True)
    for number in range(8):
        canvas.box(12, 34 + 22 * number, 56, 22, KEPT["activations"], thick=1)
    canvas.text(40, 228, "8 micro-", size=18)
    canvas.text(40, 250, "batches", size=18)
    canvas.arrow([(72, 81), (_LEFT + 4, 81)], thick=2.5)
    for rank in range(ranks):
        x = _LEFT + rank * (wide + _GAP)
        canvas.text(x + wide / 2, 16, f"rank {rank}", size=18, bold=True)
        canvas.box(x, 34, wide, 176, thick=1)  # no colour: arrows and layers have one
        for layer in range(2):
            name = f"layer {2 * rank + layer + 1}"
            canvas.box(x + 8, 58 + 74 * layer, wide - 16, 46, KEPT["parameters"], name, size=18)
        canvas.arrow([(x + wide / 2, 105), (x + wide / 2, 131)], thick=2.5)
        if rank == ranks - 1:
            canvas.text(x + wide / 2, 194, "loss", size=18)
        else:  # from this rank's second layer up to the next rank's first, and back
            canvas.arrow([(x + wide - 7, 143), (x + wide + _GAP + 7, 69)], _SENT)
            canvas.arrow([(x + wide + _GAP + 7, 95), (x + wide - 7, 169)], _SENT, dashed=True)
    canvas.arrow([(_LEFT, 234), (_LEFT + 52, 234)], _SENT)
    canvas.text(_LEFT + 64, 234, "activations of one micro-batch, A bytes", size=18, anchor="start")
    canvas.arrow([(_LEFT + 52, 264), (_LEFT, 264)], _SENT, dashed=True)
    canvas.text(_LEFT + 64, 264, "their gradients, A bytes, on the way back", size=18, anchor="start")
    return Drawing(
        canvas,
        f"A model of {2 * ranks} layers on {ranks} ranks, two layers on each. A batch comes in as eight micro-batches; "
        "between neighbours travel a micro-batch's activations, and on the way back their gradients.",
    )


def two_chunks(ranks: int = 4) -> Drawing:
    """Two stages on each rank, placed in two ways: rank by rank twice (interleaved 1F1B), and as a V (ZB-V).

    Args:
        ranks: p, from 2 to 5.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 5:
        raise ValueError(f"two stages on each of 2 to 5 ranks can be drawn, not of {ranks}")
    canvas = Canvas(640, 54 + 62 * ranks)
    for left, name, upward in ((84, "round and round", False), (400, "down and up: a V", True)):
        second = [2 * ranks - 1 - rank if upward else ranks + rank for rank in range(ranks)]
        canvas.text(left + 116, 18, name, bold=True)
        places: dict[int, tuple[float, float]] = {}
        for rank in range(ranks):
            y = 48 + 62 * rank
            canvas.text(left - 12, y + 21, f"rank {rank}", size=18, anchor="end")
            for x, stage in ((left, rank), (left + 148, second[rank])):
                canvas.box(x, y, 84, 42, rank_colour(rank), f"stage {stage}", size=18)
                places[stage] = x, y
        for stage, after in pairwise(sorted(places)):
            _hand_on(canvas, places[stage], places[after])
    return Drawing(
        canvas,
        f"Two stages on each of {ranks} ranks. Round and round, rank i has stages i and {ranks} + i, and the last rank "
        f"hands on to the first. As a V, rank i has stages i and {2 * ranks - 1} − i: the last rank hands on to "
        "itself, and the first rank has the last stage.",
    )


def _hand_on(canvas: Canvas, place: tuple[float, float], after: tuple[float, float]) -> None:
    """An arrow for an activation: to the rank below or above, to the same rank's other stage, or to the first rank."""
    (x, y), (to, below) = place, after
    if x == to:
        down = below > y
        canvas.arrow([(x + 42, y + (44 if down else -2)), (x + 42, below + (-2 if down else 44))], _SENT)
    elif y == below:
        canvas.arrow([(x + 87, y + 21), (to - 3, y + 21)], "currentColor")  # on one rank: nothing is sent
    else:
        canvas.arrow([(x + 87, y + 21), (x + 116, y + 21), (x + 116, below + 21), (to - 3, below + 21)], _SENT)
