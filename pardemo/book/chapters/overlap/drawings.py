"""Overlap: computation and messages over time, a product in a ring, and two halves that take turns."""

from collections.abc import Sequence
from typing import NamedTuple

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import COMPUTED, DONE, RANKS
from pardemo.draw.parts import legend

_TALK = DONE["communication"]
HIGH = 34  # of a box over time


class _Box(NamedTuple):
    """Something that is done: from when to when, in units of a drawing's time, and a word in its box."""

    begin: float
    end: float
    word: str = ""


@drawing(428)
def three_ways(canvas: Canvas) -> None:
    """Three time lines of a product and its communication. One after the other they take 14 units. In four pieces, the
    messages of the first three travel while the next piece is computed, and only the last one sticks out: 9.5 units. In
    a ring the first piece is at home, and each message travels while a piece is multiplied: 8."""
    legend(canvas, 20, 20, {"the GPU computes": COMPUTED, "a message travels": _TALK})
    ways = (
        ("one after the other", [_Box(0, 8)], [_Box(8, 14)]),
        ("in four pieces: the last message sticks out", *_pieces(4, 2, 1.5)),
        ("in a ring: the first piece is at home, nothing sticks out", _pieces(4, 2, 1.5)[0],
         [_Box(2 * k, 2 * k + 1.5) for k in range(3)]),
    )  # fmt: skip
    for number, (title, computed, sent) in enumerate(ways):
        y = 62 + 126 * number
        canvas.text(20, y, title, "start", size=19, bold=True)
        _rows(canvas, y + 18, 42.0, computed, sent)


def _pieces(count: int, compute: float, send: float) -> tuple[list[_Box], list[_Box]]:
    computed = [_Box(compute * k, compute * (k + 1), str(k + 1)) for k in range(count)]
    return computed, [_Box(box.end, box.end + send, box.word) for box in computed]


def _rows(canvas: Canvas, y: float, unit: float, computed: Sequence[_Box], sent: Sequence[_Box]) -> None:
    """Two rows of boxes over time: what is computed, and below it what travels."""
    for row, (boxes, colour) in enumerate(((computed, COMPUTED), (sent, _TALK))):
        for box in boxes:
            x, width = 20 + unit * box.begin, unit * (box.end - box.begin)
            canvas.box(x, y + row * (HIGH + 4), width, HIGH, colour, box.word)


@drawing()
def ring_of_products(canvas: Canvas, ranks: int = 4) -> str:
    """Which rank's chunk each rank multiplies at each step of the ring, and which chunk travels meanwhile."""
    wide, left = 124, 96
    canvas.height = 86 + 62 * ranks + 42
    for step in range(ranks):
        canvas.text(left + wide * step + 52, 22, f"step {step + 1}", size=19, bold=True)
    for rank in range(ranks):
        y = 46 + 62 * rank
        canvas.text(20, y + 21, f"rank {rank}", "start", bold=True, size=20)
        for step in range(ranks):
            x, chunk = left + wide * step, (rank - step) % ranks
            canvas.box(x, y, 104, 42, RANKS[chunk], f"chunk {chunk}", size=19)
    for step in range(ranks - 1):  # down to the next rank, while this step multiplies
        x = left + wide * step + 108
        for rank in range(ranks - 1):
            y = 46 + 62 * rank + 24
            canvas.arrow([(x, y), (x + 14, y + 36)], _TALK, 3)
    canvas.lines(20, 46 + 62 * ranks + 16, ("An arrow is the hop that travels while the chunk at its",
         "beginning is multiplied. The last rank sends to rank 0."), "start")  # fmt: skip
    order = "; ".join(
        f"rank {rank}: {', '.join(str((rank - step) % ranks) for step in range(ranks))}" for rank in range(ranks)
    )
    return f"Chunks in the order in which each rank multiplies them: {order}."


@drawing(246)
def two_halves(canvas: Canvas) -> None:
    """A layer with experts in two halves. While an exchange of one half travels, the GPU computes the other half's
    attention or experts; while the last one comes back, the next layer begins."""
    legend(canvas, 20, 20, {"first half of the tokens": RANKS[0], "second half": RANKS[1]})
    unit, words = 118, ("attention", "experts", "attention")
    canvas.text(25, 56, "the GPU computes", "start")
    canvas.text(25 + 4 * unit, 56, "next layer", "start")
    for at in range(5):
        canvas.box(25 + unit * at, 70, unit, 46, RANKS[at % 2], words[at // 2], size=19)
    for at in range(4):
        way = ("there", "back")[at // 2]
        canvas.box(25 + unit * (at + 1), 126, unit, 46, RANKS[at % 2], way, size=19, border=_TALK, thick=4)
    canvas.text(25, 192, "an exchange travels (orange border)", "start")
    canvas.text(25, 222, "Each exchange has the other half's work above it.", "start")
