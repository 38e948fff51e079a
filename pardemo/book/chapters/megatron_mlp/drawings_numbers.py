"""Both cuts of a matrix multiplication, with the small numbers that two ranks have computed."""

from collections.abc import Sequence

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS, WHOLE

_TALK = DONE["communication"]
_SIDE, _HIGH = 46, 34  # of a number's box
Matrix = Sequence[Sequence[float]]  # a tensor, too


def two_cuts_in_numbers(
    x: Matrix, w: Matrix, pieces: Sequence[Matrix], parts: Sequence[Matrix], total: Matrix
) -> Drawing:
    """The parts of Y = XW on two ranks, with W cut by columns and by rows, and how Y's first number is computed.

    Args:
        x, w: X [2, 4] and W [4, 4]. pieces: by rank, its columns of Y. parts: by rank, its part of every number of Y.
            total: the sum of the parts.
    """
    canvas, right = Canvas(640, 392), 640 - 4 * _SIDE - 4
    terms = [f"{_number_text(value)}·{_number_text(row[0])}" for value, row in zip(x[0], w, strict=True)]
    canvas.text(4, 14, "by columns: each rank has its columns, and nobody talks", size=18, anchor="start", bold=True)
    for rank, piece in enumerate(pieces):
        _matrix(canvas, 4 + 2 * rank * _SIDE, 34, piece, RANKS[rank], f"rank {rank}", framed=rank == 0)
    canvas.text(216, 51, "the first number:", size=18, anchor="start")
    canvas.box(216, 70, 316, _HIGH, RANKS[0], f"{' + '.join(terms)} = {_number_text(pieces[0][0][0])}", size=18)
    canvas.text(4, 168, "by rows: each rank has a part of every number", size=18, anchor="start", bold=True)
    places = (4, (right + 4) / 2)
    for rank, part in enumerate(parts):
        _matrix(canvas, places[rank], 188, part, RANKS[rank], f"rank {rank}")
    _matrix(canvas, right, 188, total, WHOLE, "on both")
    for place, sign in zip((places[1], right), "+=", strict=True):
        _sign(canvas, place - 16, 188 + _HIGH, sign)
    canvas.text(4, 312, "the first number:", size=18, anchor="start")
    for rank, part in enumerate(parts):
        sum_text = f"{' + '.join(terms[2 * rank : 2 * rank + 2])} = {_number_text(part[0][0])}"
        canvas.box(places[rank], 330, 4 * _SIDE, _HIGH, RANKS[rank], sum_text, size=18)
    canvas.box(right, 330, 4 * _SIDE, _HIGH, WHOLE, _number_text(total[0][0]), size=18)
    for place, sign in zip((places[1], right), "+=", strict=True):
        _sign(canvas, place - 16, 330 + _HIGH / 2, sign)
    canvas.text(636, 380, "+ between ranks: the all-reduce", size=18, anchor="end", fill=_TALK, bold=True)
    first = [_number_text(matrix[0][0]) for matrix in (pieces[0], *parts, total)]
    return Drawing(
        canvas,
        f"X W with W cut by columns and by rows. By columns rank 0 has Y's first number, {first[0]}. By rows rank 0 "
        f"has {first[1]} of it and rank 1 {first[2]}, and the all-reduce adds them to {first[3]}.",
    )


def _matrix(canvas: Canvas, x: float, y: float, matrix: Matrix, fill: str, name: str, framed: bool = True) -> None:
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            thick = 3 if framed and row == column == 0 else 1
            canvas.box(
                x + _SIDE * column, y + _HIGH * row, _SIDE, _HIGH, fill, _number_text(value), size=18, thick=thick
            )
    canvas.text(x + _SIDE * len(matrix[0]) / 2, y + _HIGH * len(matrix) + 18, name, size=18)


def _sign(canvas: Canvas, x: float, y: float, sign: str) -> None:
    """A sign between two matrices; a plus has the colour of communication."""
    canvas.text(x, y, sign, size=26, fill=_TALK if sign == "+" else "currentColor", bold=True)


def _number_text(value: float) -> str:
    return f"{float(value):g}"
