"""Fewer key and value heads than ranks: which rank holds which head, and whose gradients are summed."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS
from pardemo.draw.parts import SUBSCRIPTS

_TALK = DONE["communication"]
_RANKS, _QUERIES, _SHARED, _WIDE = 4, 8, 2, 66


def shared_heads() -> Drawing:
    """Eight query heads and two heads of keys and values on four ranks: two ranks hold each of the two heads."""
    canvas = Canvas(640, 320)
    canvas.text(320, 62, "each rank its own query heads", size=18)
    canvas.text(320, 154, "and a replica of the head of keys and values that they ask", size=18)
    for rank in range(_RANKS):
        x = 10 + 160 * rank
        canvas.text(x + _WIDE, 20, f"rank {rank}", size=22, bold=True)
        for place, head in enumerate(queries_of(rank)):
            canvas.box(x + place * _WIDE, 80, _WIDE, 44, RANKS[rank], "q" + SUBSCRIPTS[head])
        _replica(canvas, x, rank)
    for first in range(0, _RANKS, _RANKS // _SHARED):
        left, right = (10 + 160 * rank + _WIDE for rank in (first, first + 1))
        canvas.arrow([(left, 234), (left, 264), (right, 264), (right, 234)], _TALK, both=True)
        canvas.text((left + right) / 2, 294, "sum of the gradients", size=19, fill=_TALK, bold=True)
    return Drawing(
        canvas,
        "Eight query heads and two key and value heads on four ranks. Each rank has two query heads; ranks 0 and 1 "
        "hold the same key and value head, ranks 2 and 3 the other, and each pair adds the gradients of its replicas.",
    )


def _replica(canvas: Canvas, x: float, rank: int) -> None:
    """A rank's replica of a head of keys and values, and a band that names the other rank that holds it."""
    for place, letter in enumerate("kv"):
        canvas.box(x + place * _WIDE, 172, _WIDE, 32, RANKS[rank], letter + SUBSCRIPTS[shared_of(rank)])
    (other,) = (other for other in range(_RANKS) if shared_of(other) == shared_of(rank) and other != rank)
    canvas.box(x, 204, 2 * _WIDE, 26, RANKS[other], f"also rank {other}", size=18)


def queries_of(rank: int) -> list[int]:
    """The query heads that a rank computes."""
    each = _QUERIES // _RANKS
    return list(range(rank * each, (rank + 1) * each))


def shared_of(rank: int) -> int:
    """The head of keys and values that a rank holds a replica of."""
    return rank * _SHARED // _RANKS
