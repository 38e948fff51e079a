"""Overlap: computation and messages over time, a matrix multiplication in a ring, and two halves that take turns."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import COMPUTED, DONE, RANKS
from pardemo.draw.parts import legend

_TALK = DONE["communication"]
HIGH = 34  # of a box over time


@drawing(428)
def three_ways(canvas: Canvas) -> None:
    """Three time lines of a matrix multiplication and its communication. One after the other they take 14 units. In
    four pieces, the messages of the first three travel while the next piece is computed, and only the last one is
    exposed: 9.5 units. In a ring the first piece is at home, and each message travels while a piece is multiplied: 8.
    """
    legend(canvas, 20, 20, {"the GPU computes": COMPUTED, "a message travels": _TALK})
    # begin, length and word of each box: what is computed, and below it what travels
    pieces = [(2.0 * k, 2.0, str(k + 1)) for k in range(4)]
    ways = {
        "one after the other": ([(0, 8, "")], [(8, 6, "")]),
        "in four pieces: the last message is exposed": (pieces, [(begin + 2, 1.5, word) for begin, _, word in pieces]),
        "in a ring: the first piece is at home, nothing is exposed": (pieces, [(2 * k, 1.5, "") for k in range(3)]),
    }
    for number, (title, rows) in enumerate(ways.items()):
        y = 62 + 126 * number
        canvas.text(20, y, title, "start", size=19, bold=True)
        for row, (boxes, colour) in enumerate(zip(rows, (COMPUTED, _TALK), strict=True)):
            for begin, length, word in boxes:
                canvas.box(20 + 42 * begin, y + 18 + row * (HIGH + 4), 42 * length, HIGH, colour, word)


@drawing(376)
def ring_of_products(canvas: Canvas) -> None:
    """Chunks in the order in which each rank multiplies them: rank 0: 0, 3, 2, 1; rank 1: 1, 0, 3, 2; rank 2: 2, 1, 0,
    3; rank 3: 3, 2, 1, 0."""
    wide, left, ranks = 124, 96, 4
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
    canvas.text(20, 310, "An arrow is the hop that travels while the chunk at its", "start")
    canvas.text(20, 334, "beginning is multiplied. The last rank sends to rank 0.", "start")


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
