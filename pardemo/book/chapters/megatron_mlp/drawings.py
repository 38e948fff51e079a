"""Matrix multiplications cut over two ranks, by columns and by rows, and where the ranks have to communicate."""

from collections.abc import Sequence

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, RANKS, WHOLE
from pardemo.draw.parts import legend

PART_OF = ("⁽⁰⁾", "⁽¹⁾")  # a rank's part of a matrix has the rank as its index above
_TALK = DONE["communication"]


@drawing(250)
def column_cut(canvas: Canvas) -> None:
    """Y = X W, W cut by columns: each rank has all of X and makes its own columns of Y."""
    canvas.box(20, 70, 120, 120, WHOLE, "X", size=20)
    for x, sign in ((165, "×"), (378, "=")):
        canvas.text(x, 130, sign, size=30)
    for rank, part in enumerate(PART_OF):
        canvas.box(190 + 80 * rank, 70, 80, 120, RANKS[rank], "W" + part, size=20)
        canvas.box(405 + 80 * rank, 70, 80, 120, RANKS[rank], "Y" + part, size=20)
    for x, words in ((80, "whole on both"), (270, "columns cut"), (485, "each rank its columns")):
        canvas.text(x, 215, words, size=19)
    legend(canvas, 20, 29, {"rank 0": RANKS[0], "rank 1": RANKS[1]})


@drawing(300)
def row_cut(canvas: Canvas) -> None:
    """Y = X W, W cut by rows: each rank makes a part of every number of Y, and the parts are added."""
    for x, sign in ((158, "×"), (308, "=")):
        canvas.text(x, 130, sign, size=30)
    for rank, part in enumerate(PART_OF):
        canvas.box(10 + 65 * rank, 70, 65, 120, RANKS[rank], "X" + part, size=20)
        canvas.box(178, 70 + 60 * rank, 110, 60, RANKS[rank], "W" + part, size=20)
        canvas.box(330 + 150 * rank, 70, 110, 120, RANKS[rank], f"X{part}W{part}", size=20)
        canvas.text(385 + 150 * rank, 215, f"rank {rank}'s part", size=19)
    canvas.text(75, 215, "columns cut", size=19)
    canvas.text(233, 215, "rows cut", size=19)
    canvas.text(460, 130, "+", size=30, fill=_TALK, bold=True)
    canvas.arrow([(460, 152), (460, 262)], _TALK)
    canvas.text(445, 281, "all-reduce: the ranks have to talk", size=19, fill=_TALK, bold=True)
    legend(canvas, 20, 29, {"rank 0": RANKS[0], "rank 1": RANKS[1]})


@drawing(376)
def mlp_cut(canvas: Canvas, backward: bool = False, gated: bool = False) -> str:
    """Megatron's MLP: W₁ cut by columns, GeLU, W₂ cut by rows; f and g are where the ranks communicate.

    Args:
        backward: draw the backward pass instead, from right to left, with its one all-reduce.
        gated: draw the gated MLP of Llama and others: the gate and up matrices cut by columns, the down matrix by rows.
    """
    f, g, way = 176, 550, "d" * backward
    for rank, part in enumerate(PART_OF):
        y, colour = 84 + 190 * rank, RANKS[rank]
        canvas.text(8, y, f"rank {rank}", "start", bold=True)
        canvas.box(82, y - 40, 52, 80, WHOLE, f"{way}X", size=22)
        if gated:
            canvas.box(214, y - 46, 60, 44, colour, "gate", size=20)
            canvas.box(214, y + 2, 60, 44, colour, "up", size=20)
        else:
            canvas.box(214, y - 46, 60, 92, colour, "W₁" + part, size=19)
        canvas.box(296, y - 28, 84, 56, colour, "SiLU, ∘" if gated else "GeLU", size=20)
        canvas.box(410, y - 24, 94, 48, colour, "down" if gated else "W₂" + part, size=20)
        canvas.box(590, y - 40, 46, 80, WHOLE, f"{way}Z", size=22)
        for x, name in ((f, "f"), (g, "g")):
            canvas.box(x - 18, y - 24, 36, 48, "none", name, size=24, border=_TALK, thick=3)
        for left, right in ((137, 155), (197, 212), (277, 293), (383, 407), (507, 529), (571, 588)):
            canvas.arrow([(right, y), (left, y)] if backward else [(left, y), (right, y)], thick=2.5)
        canvas.text(108, y + 62, "h wide")
        canvas.text(338, y + 62, "4h/t wide")
    canvas.arrow([(f, 110), (f, 248)], _TALK, 4, both=True, dashed=not backward)
    canvas.lines(f + 14, 170, ["backward:", "all-reduce"], "start", fill=_TALK, bold=True)
    if backward:
        canvas.text(20, 362, "dZ is the same on both ranks; dX is a sum.", "start")
        alt_sentence = "Its gradients on the way back: dZ is the same on both ranks, and f adds up their parts of dX."
    else:
        canvas.arrow([(g, 110), (g, 248)], _TALK, 4, both=True)
        canvas.lines(g - 14, 170, ["forward:", "all-reduce"], "end", fill=_TALK, bold=True)
        canvas.text(20, 362, "white: whole on both ranks, and the same", "start")
        alt_sentence = "f adds up gradients on the way back, g the two parts of Z on the way forward."
    alt = "Megatron's MLP on two ranks: each takes all of X through its columns of W₁, GeLU and its rows of W₂. "
    if gated:
        alt = "A gated MLP on two ranks: each takes all of X through its columns of W_gate and W_up, the gate and its "
        alt += "rows of W_down. "
    return alt + alt_sentence


_SIDE, _HIGH = 46, 34  # of a number's box
Matrix = Sequence[Sequence[float]]  # a tensor, too


@drawing(392)
def two_cuts_in_numbers(
    canvas: Canvas, x: Matrix, w: Matrix, pieces: Sequence[Matrix], parts: Sequence[Matrix], total: Matrix
) -> str:
    """The parts of Y = XW on two ranks, with W cut by columns and by rows, and how Y's first number is computed.

    Args:
        x, w: X [2, 4] and W [4, 4]. pieces: by rank, its columns of Y. parts: by rank, its part of every number of Y.
            total: the sum of the parts.
    """
    right = 640 - 4 * _SIDE - 4
    terms = [f"{_number_text(value)}·{_number_text(row[0])}" for value, row in zip(x[0], w, strict=True)]
    canvas.text(4, 14, "by columns: each rank has its columns, and nobody talks", "start", bold=True)
    for rank, piece in enumerate(pieces):
        _matrix(canvas, 4 + 2 * rank * _SIDE, 34, piece, RANKS[rank], f"rank {rank}", framed=rank == 0)
    canvas.text(216, 51, "the first number:", "start")
    canvas.box(216, 70, 316, _HIGH, RANKS[0], f"{' + '.join(terms)} = {_number_text(pieces[0][0][0])}")
    canvas.text(4, 168, "by rows: each rank has a part of every number", "start", bold=True)
    places = (4, (right + 4) / 2)
    for rank, part in enumerate(parts):
        _matrix(canvas, places[rank], 188, part, RANKS[rank], f"rank {rank}")
    _matrix(canvas, right, 188, total, WHOLE, "on both")
    for y in (188 + _HIGH, 330 + _HIGH / 2):
        canvas.text(places[1] - 16, y, "+", size=26, fill=_TALK, bold=True)
        canvas.text(right - 16, y, "=", size=26, bold=True)
    canvas.text(4, 312, "the first number:", "start")
    for rank, part in enumerate(parts):
        sum_text = f"{' + '.join(terms[2 * rank : 2 * rank + 2])} = {_number_text(part[0][0])}"
        canvas.box(places[rank], 330, 4 * _SIDE, _HIGH, RANKS[rank], sum_text)
    canvas.box(right, 330, 4 * _SIDE, _HIGH, WHOLE, _number_text(total[0][0]))
    canvas.text(636, 380, "+ between ranks: the all-reduce", "end", fill=_TALK, bold=True)
    first = [_number_text(matrix[0][0]) for matrix in (pieces[0], *parts, total)]
    return (
        f"X W with W cut by columns and by rows. By columns rank 0 has Y's first number, {first[0]}. By rows rank 0 "
        f"has {first[1]} of it and rank 1 {first[2]}, and the all-reduce adds them to {first[3]}."
    )


def _matrix(canvas: Canvas, x: float, y: float, matrix: Matrix, fill: str, name: str, framed: bool = True) -> None:
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            thick = 3 if framed and row == column == 0 else 1
            canvas.box(x + _SIDE * column, y + _HIGH * row, _SIDE, _HIGH, fill, _number_text(value), thick=thick)
    canvas.text(x + _SIDE * len(matrix[0]) / 2, y + _HIGH * len(matrix) + 18, name)


def _number_text(value: float) -> str:
    return f"{float(value):g}"
