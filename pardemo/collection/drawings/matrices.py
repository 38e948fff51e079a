"""Products of matrices that are cut: over which ranks, and where they have to talk."""

from pardemo.collection.drawings.key import DONE, RANKS, WHOLE
from pardemo.collection.drawings.svg import Canvas, Drawing


def column_cut() -> Drawing:
    """Y = XA with the columns of A on two ranks: each makes its own columns of Y, and nobody has to send."""
    canvas = Canvas(640, 250)
    canvas.box(20, 70, 120, 120, WHOLE, "X")
    _sign(canvas, 165, "×")
    _halves(canvas, 190, 70, 160, 120, "A", side_by_side=True)
    _sign(canvas, 378, "=")
    _halves(canvas, 405, 70, 160, 120, "Y", side_by_side=True)
    _word(canvas, 80, 215, "whole on both")
    _word(canvas, 270, 215, "columns cut")
    _word(canvas, 485, 215, "each rank its columns")
    _legend(canvas, 20)
    return Drawing(canvas, "Y = X A, A cut by columns: each rank has all of X and makes its own columns of Y.")


def row_cut() -> Drawing:
    """Y = XA with the rows of A on two ranks: each makes a part of every number of Y, and the parts are added."""
    canvas = Canvas(640, 290)
    _halves(canvas, 10, 70, 130, 120, "X", side_by_side=True)
    _sign(canvas, 158, "×")
    _halves(canvas, 178, 70, 110, 120, "A", side_by_side=False)
    _sign(canvas, 308, "=")
    canvas.box(330, 70, 110, 120, RANKS[0], "X₀A₀")
    _sign(canvas, 460, "+", DONE["communication"])
    canvas.box(480, 70, 110, 120, RANKS[1], "X₁A₁")
    _word(canvas, 75, 215, "columns cut")
    _word(canvas, 233, 215, "rows cut")
    _word(canvas, 460, 215, "each a part of the sum")
    canvas.text(
        630, 255, "all-reduce: the ranks have to talk", size=19, anchor="end", fill=DONE["communication"], bold=True
    )
    _legend(canvas, 20)
    return Drawing(
        canvas, "Y = X A, A cut by rows: each rank makes a part of every entry of Y, and the parts are added."
    )


def mlp_cut() -> Drawing:
    """Megatron's MLP: A by columns, GeLU, B by rows; f and g are the two places where ranks talk."""
    canvas = Canvas(640, 420)
    f, g, talk = 130, 500, DONE["communication"]
    canvas.box(15, 150, 70, 90, WHOLE, "X", size=24)
    canvas.arrow([(88, 195), (f - 22, 195)])
    for rank, y in ((0, 70), (1, 230)):
        middle, colour = y + 45, RANKS[rank]
        canvas.arrow([(f, 195 + (24 if rank else -24)), (f, middle), (f + 52, middle)])
        canvas.box(f + 54, y, 70, 90, colour, "A" + "₀₁"[rank], size=24)
        canvas.arrow([(f + 127, middle), (f + 147, middle)])
        canvas.box(f + 150, y + 15, 80, 60, colour, "GeLU", size=22)
        canvas.arrow([(f + 233, middle), (f + 253, middle)])
        canvas.box(f + 256, y, 70, 90, colour, "B" + "₀₁"[rank], size=24)
        canvas.arrow([(f + 329, middle), (g, middle), (g, 195 + (26 if rank else -26))])
        canvas.text(f + 190, y - 18 if rank == 0 else y + 108, f"rank {rank}", size=22, bold=True)
    for x, name in ((f, "f"), (g, "g")):
        canvas.box(x - 20, 173, 40, 44, "none", name, size=26, border=talk, thick=3)
    canvas.arrow([(g + 22, 195), (g + 50, 195)])
    canvas.box(g + 53, 150, 70, 90, WHOLE, "Z", size=24)
    canvas.text(15, 372, "f: forward as it is,", size=19, anchor="start")
    canvas.text(15, 398, "backward an all-reduce", size=19, anchor="start", fill=talk, bold=True)
    canvas.text(625, 372, "g: forward an all-reduce,", size=19, anchor="end", fill=talk, bold=True)
    canvas.text(625, 398, "backward as it is", size=19, anchor="end")
    return Drawing(
        canvas,
        "Megatron's MLP on two ranks: X goes through f to the column halves of A, through GeLU and the row halves of "
        "B, and g adds the two results. f sums gradients backward, g sums forward.",
    )


def _halves(
    canvas: Canvas, x: float, y: float, width: float, height: float, name: str, side_by_side: bool
) -> None:  # fmt: skip
    for rank in (0, 1):
        text = name + "₀₁"[rank]
        if side_by_side:
            canvas.box(x + rank * width / 2, y, width / 2, height, RANKS[rank], text)
        else:
            canvas.box(x, y + rank * height / 2, width, height / 2, RANKS[rank], text)


def _sign(canvas: Canvas, x: float, sign: str, fill: str = "currentColor") -> None:
    canvas.text(x, 130, sign, size=30, fill=fill, bold=fill != "currentColor")


def _word(canvas: Canvas, x: float, y: float, words: str) -> None:
    canvas.text(x, y, words, size=19)


def _legend(canvas: Canvas, x: float) -> None:
    for rank in (0, 1):
        canvas.box(x + 110 * rank, 18, 22, 22, RANKS[rank])
        canvas.text(x + 30 + 110 * rank, 29, f"rank {rank}", size=18, anchor="start")
