"""Draws what each optimizer keeps beside a matrix, and how the shards of matrices come together on their owners."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS

_STATE = KEPT["optimizer states"]
_WIDE, _HIGH = 96, 54  # of the matrix in the picture
#: Optimizer, what it keeps (boxes: width, height, and the part that is filled), what an element's update depends on.
OPTIMIZERS = (
    ("SGD, momentum", ((_WIDE, _HIGH, 1.0),), ("the element",)),
    ("Adam", ((_WIDE, _HIGH, 1.0), (_WIDE, _HIGH, 1.0)), ("the element",)),
    ("8-bit Adam", ((_WIDE, _HIGH, 0.25), (_WIDE, _HIGH, 0.25)), ("its block", "of 256")),
    ("Adafactor", ((8, _HIGH, 1.0), (_WIDE, 8, 1.0)), ("its row and", "its column")),
    ("Muon", ((_WIDE, _HIGH, 1.0),), ("the whole", "matrix")),
    ("Shampoo", ((_HIGH, _HIGH, 1.0), (_HIGH, _HIGH, 1.0), (_WIDE, _WIDE, 1.0), (_WIDE, _WIDE, 1.0)),
     ("the whole", "matrix")),
)  # fmt: skip


@drawing(640)
def kept_by_optimizer(canvas: Canvas) -> None:
    """For a matrix of parameters SGD with momentum and Muon keep one matrix of its size, Adam two, 8-bit Adam two of a
    quarter of the bytes, Adafactor one row and one column, Shampoo two squares of its rows and two of its columns. SGD
    and Adam update each element from its own states, 8-bit Adam in blocks of 256, Adafactor from a row and a column;
    Muon and Shampoo need the whole matrix."""
    canvas.text(12, 18, "the matrix", "start", bold=True)
    canvas.box(12, 34, _WIDE, _HIGH, KEPT["parameters"], "W", size=20)
    canvas.text(186, 18, "what the optimizer keeps", "start", bold=True)
    canvas.lines(636, 18, ("an element's", "update needs"), "end", bold=True)
    y = 104.0
    for name, states, needs in OPTIMIZERS:
        high = max(tall for _, tall, _ in states)
        canvas.text(12, y + high / 2, name, "start")
        x = 186.0
        for wide, tall, filled in states:
            if filled < 1:
                canvas.box(x, y, wide, tall, dashed=True, thick=1)
            canvas.box(x, y + tall * (1 - filled), wide, tall * filled, _STATE, thick=1)
            x += wide + 10
        canvas.lines(636, y + high / 2 - 12 * (len(needs) - 1), needs, "end")
        y += high + 24
    canvas.text(12, y + 8, "green: states; dashed: their size in fp32", "start")


@drawing(316)
def to_the_owners(canvas: Canvas) -> None:
    """Four ranks hold rows of the four matrices A, B, C and D. An all-to-all puts A together on rank 0, B on rank 1, C
    on rank 2 and D on rank 3, where each is orthogonalised whole; a second all-to-all brings every rank its rows of the
    four updates."""
    titles = {76: ("rows of each", "matrix"), 284: ("one matrix", "whole"), 492: ("rows of each", "update")}
    for x, lines in titles.items():
        canvas.lines(x + 70, 18, lines, bold=True)
        for rank in range(4):
            for index in range(4):
                row_of, matrix = (index, rank) if x == 284 else (rank, index)
                canvas.box(x + 36 * index, 70 + 52 * rank, 32, 32, RANKS[row_of], "ABCD"[matrix])
    for rank in range(4):
        canvas.text(8, 86 + 52 * rank, f"rank {rank}", "start")
    for x in (224, 432):
        canvas.arrow([(x, 164), (x + 52, 164)], DONE["communication"])
    canvas.text(12, 294, "colour: whose rows they are; arrow: one all-to-all", "start")
