"""Matrix multiplications cut over two ranks, by columns and by rows, and where the ranks have to communicate."""

from collections.abc import Sequence

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, RANKS, WHOLE


@drawing(250)
def column_cut(canvas: Canvas) -> None:
    """Y = X W, W cut by columns: each rank has all of X and makes its own columns of Y."""
    canvas.box(20, 70, 120, 120, WHOLE, "X", size=20)
    _sign(canvas, 165, "×")
    _halves(canvas, 190, 70, 160, 120, "W", side_by_side=True)
    _sign(canvas, 378, "=")
    _halves(canvas, 405, 70, 160, 120, "Y", side_by_side=True)
    _word(canvas, 80, 215, "whole on both")
    _word(canvas, 270, 215, "columns cut")
    _word(canvas, 485, 215, "each rank its columns")
    _legend(canvas, 20)


@drawing(300)
def row_cut(canvas: Canvas) -> None:
    """Y = X W, W cut by rows: each rank makes a part of every number of Y, and the parts are added."""
    _halves(canvas, 10, 70, 130, 120, "X", side_by_side=True)
    _sign(canvas, 158, "×")
    _halves(canvas, 178, 70, 110, 120, "W", side_by_side=False)
    _sign(canvas, 308, "=")
    canvas.box(330, 70, 110, 120, RANKS[0], "X⁽⁰⁾W⁽⁰⁾", size=20)
    _sign(canvas, 460, "+", DONE["communication"])
    canvas.box(480, 70, 110, 120, RANKS[1], "X⁽¹⁾W⁽¹⁾", size=20)
    _word(canvas, 75, 215, "columns cut")
    _word(canvas, 233, 215, "rows cut")
    for rank, x in enumerate((385, 535)):
        _word(canvas, x, 215, f"rank {rank}'s part")
    canvas.arrow([(460, 152), (460, 262)], DONE["communication"])
    canvas.text(445, 281, "all-reduce: the ranks have to talk", size=19, fill=DONE["communication"], bold=True)
    _legend(canvas, 20)


@drawing(376)
def mlp_cut(canvas: Canvas, backward: bool = False, gated: bool = False) -> str:
    """Megatron's MLP: W₁ cut by columns, GeLU, W₂ cut by rows; f and g are where the ranks communicate.

    Args:
        backward: draw the backward pass instead, from right to left, with its one all-reduce.
        gated: draw the gated MLP of Llama and others: the gate and up matrices cut by columns, the down matrix by rows.
    """
    talk = DONE["communication"]
    for rank in range(2):
        _mlp_row(canvas, 84 + 190 * rank, rank, backward, gated)
    for x, end, anchor, label in ((_F, _F + 14, "start", "backward:"), (_G, _G - 14, "end", "forward:")):
        if not backward or anchor == "start":
            canvas.arrow([(x, 110), (x, 248)], talk, 4, both=True, dashed=not backward and anchor == "start")
            canvas.lines(end, 170, [label, "all-reduce"], anchor, fill=talk, bold=True)
    if backward:
        canvas.text(20, 362, "dZ is the same on both ranks; dX is a sum.", "start")
        alt_sentence = "Its gradients on the way back: dZ is the same on both ranks, and f adds up their parts of dX."
    else:
        canvas.text(20, 362, "white: whole on both ranks, and the same", "start")
        alt_sentence = "f adds up gradients on the way back, g the two parts of Z on the way forward."
    kind = "A gated MLP" if gated else "Megatron's MLP"
    first, second = ("W_gate and W_up", "W_down") if gated else ("W₁", "W₂")
    middle = "the gate" if gated else "GeLU"
    return (
        f"{kind} on two ranks: each takes all of X through its columns of {first}, {middle} and its rows of {second}. "
        + alt_sentence
    )


#: A rank's part of a matrix has the rank as its index above.
PART_OF = ("⁽⁰⁾", "⁽¹⁾")
#: Of :func:`mlp_cut`: where f and g stand, and the left edges of X, of the first matrix, GeLU, the second one and Z.
_F, _G = 176, 550
_PLACES = {"X": 82, "first": 214, "middle": 296, "second": 410, "Z": 590}


def _mlp_row(canvas: Canvas, y: float, rank: int, backward: bool, gated: bool) -> None:
    """One rank's part of the MLP, its middle at ``y``."""
    colour, way = RANKS[rank], "d" * backward
    canvas.text(8, y, f"rank {rank}", "start", bold=True)
    canvas.box(_PLACES["X"], y - 40, 52, 80, WHOLE, f"{way}X", size=22)
    if gated:
        for name, top in (("gate", y - 46), ("up", y + 2)):
            canvas.box(_PLACES["first"], top, 60, 44, colour, name, size=20)
    else:
        canvas.box(_PLACES["first"], y - 46, 60, 92, colour, "W₁" + PART_OF[rank], size=19)
    canvas.box(_PLACES["middle"], y - 28, 84, 56, colour, "SiLU, ∘" if gated else "GeLU", size=20)
    canvas.box(_PLACES["second"], y - 24, 94, 48, colour, "down" if gated else "W₂" + PART_OF[rank], size=20)
    canvas.box(_PLACES["Z"], y - 40, 46, 80, WHOLE, f"{way}Z", size=22)
    for x, name in ((_F, "f"), (_G, "g")):
        canvas.box(x - 18, y - 24, 36, 48, "none", name, size=24, border=DONE["communication"], thick=3)
    gaps = ((137, 155), (197, 212), (277, 293), (383, 407), (507, 529), (571, 588))
    for left, right in gaps:
        canvas.arrow([(right, y), (left, y)] if backward else [(left, y), (right, y)], thick=2.5)
    for x, wide in ((108, "h wide"), (338, "4h/t wide")):
        canvas.text(x, y + 62, wide)


def _halves(
    canvas: Canvas, x: float, y: float, width: float, height: float, name: str, side_by_side: bool
) -> None:  # fmt: skip
    for rank in (0, 1):
        text = name + PART_OF[rank]
        if side_by_side:
            canvas.box(x + rank * width / 2, y, width / 2, height, RANKS[rank], text, size=20)
        else:
            canvas.box(x, y + rank * height / 2, width, height / 2, RANKS[rank], text, size=20)


def _sign(canvas: Canvas, x: float, sign: str, fill: str = "currentColor") -> None:
    canvas.text(x, 130, sign, size=30, fill=fill, bold=fill != "currentColor")


def _word(canvas: Canvas, x: float, y: float, words: str) -> None:
    canvas.text(x, y, words, size=19)


def _legend(canvas: Canvas, x: float) -> None:
    for rank in (0, 1):
        canvas.box(x + 110 * rank, 18, 22, 22, RANKS[rank])
        canvas.text(x + 30 + 110 * rank, 29, f"rank {rank}", "start")


_TALK = DONE["communication"]
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
    for place, sign in zip((places[1], right), "+=", strict=True):
        _numbers_sign(canvas, place - 16, 188 + _HIGH, sign)
    canvas.text(4, 312, "the first number:", "start")
    for rank, part in enumerate(parts):
        sum_text = f"{' + '.join(terms[2 * rank : 2 * rank + 2])} = {_number_text(part[0][0])}"
        canvas.box(places[rank], 330, 4 * _SIDE, _HIGH, RANKS[rank], sum_text)
    canvas.box(right, 330, 4 * _SIDE, _HIGH, WHOLE, _number_text(total[0][0]))
    for place, sign in zip((places[1], right), "+=", strict=True):
        _numbers_sign(canvas, place - 16, 330 + _HIGH / 2, sign)
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


def _numbers_sign(canvas: Canvas, x: float, y: float, sign: str) -> None:
    """A sign between two matrices; a plus has the colour of communication."""
    canvas.text(x, y, sign, size=26, fill=_TALK if sign == "+" else "currentColor", bold=True)


def _number_text(value: float) -> str:
    return f"{float(value):g}"
