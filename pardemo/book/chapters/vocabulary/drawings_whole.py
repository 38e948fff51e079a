"""The parts of a model that tensor parallelism of attention and MLP leaves whole on every rank."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import RANKS, WHOLE
from pardemo.draw.parts import legend

#: From the tokens to the loss: name, a note on its size, whether it is cut, and its height in the drawing.
MODEL = (
    ("embedding", "V × h weights", False, 48),
    ("dropout, norm", "s·b·h of activations", False, 40),
    ("attention", "cut by heads", True, 40),
    ("dropout, add, norm", "s·b·h of activations", False, 40),
    ("MLP", "cut by columns, rows", True, 40),
    ("dropout, add, norm", "s·b·h of activations", False, 40),
    ("output head", "V × h weights", False, 48),
    ("logits and loss", "s·b·V numbers", False, 48),
)
_LEFT, _WIDE, _GAP = (300, 478), 146, 18
#: A section, and the rows that it cuts.
_SECTIONS = (("1", (0, 6, 7)), ("2", (1, 3, 5)))


def still_whole() -> Drawing:
    """A model on two ranks from top to bottom: coloured parts are cut, white ones are whole on both."""
    height = 76 + sum(high + _GAP for *_, high in MODEL) + 24
    canvas = Canvas(640, height)
    for rank, x in enumerate(_LEFT):
        canvas.text(x + _WIDE / 2, 20, f"rank {rank}", size=22, bold=True)
    y = 44.0
    for number, (name, note, cut, high) in enumerate(MODEL):
        middle = y + high / 2
        canvas.text(52, middle - 11, name, anchor="start", bold=True)
        canvas.text(52, middle + 13, note, size=18, anchor="start")
        for section, rows in _SECTIONS:
            if number in rows:
                canvas.text(24, middle, section, size=26, bold=True)
        for rank, x in enumerate(_LEFT):
            _share(canvas, x, y, high, cut, rank)
        y += high + _GAP
    canvas.text(20, y + 14, "1 and 2: the sections that cut them", size=18, anchor="start")
    legend(canvas, 390, y + 14, {"whole on both": WHOLE})
    return Drawing(
        canvas,
        "A model on two ranks. Attention and MLP are cut: each rank has a half. Embedding, output head, logits, loss "
        "are whole on both, which section 1 cuts by words; dropout, norms and additions between layers are whole on "
        "both, which section 2 cuts by tokens.",
    )


def _share(canvas: Canvas, x: float, y: float, high: float, cut: bool, rank: int) -> None:
    if not cut:
        canvas.box(x, y, _WIDE, high, WHOLE, "all of it", size=18)
        return
    half = _WIDE / 2
    canvas.box(x, y, _WIDE, high, thick=1, dashed=True)
    canvas.box(x + rank * half, y, half, high, RANKS[rank], "½", size=20)
