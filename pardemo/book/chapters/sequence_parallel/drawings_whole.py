"""What tensor parallelism leaves whole on every rank: the activations between the layers that are cut."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import WHOLE
from pardemo.draw.parts import half_of, legend

#: A block from its input on: name, a note on it, whether it is cut, and its height in the drawing.
PARTS = (
    ("norm", "[b·s, h] on every rank", False, 44),
    ("attention", "cut by heads", True, 60),
    ("dropout, addition, norm", "[b·s, h] on every rank", False, 44),
    ("MLP", "cut by columns, then rows", True, 60),
    ("dropout, addition", "[b·s, h] on every rank", False, 44),
)
_LEFT, _WIDE, _GAP = (310, 482), 146, 18


def still_whole() -> Drawing:
    """A block on two ranks from top to bottom: coloured parts are cut, white ones are whole on both."""
    canvas = Canvas(640, 78 + sum(high + _GAP for *_, high in PARTS))
    for rank, x in enumerate(_LEFT):
        canvas.text(x + _WIDE / 2, 20, f"rank {rank}", size=22, bold=True)
    y = 44.0
    for name, note, cut, high in PARTS:
        middle = y + high / 2
        canvas.text(20, middle - 11, name, anchor="start", bold=True)
        canvas.text(20, middle + 13, note, size=18, anchor="start")
        for rank, x in enumerate(_LEFT):
            if cut:
                half_of(canvas, x, y, _WIDE, high, rank)
            else:
                canvas.box(x, y, _WIDE, high, WHOLE, "all of it", size=18)
        y += high + _GAP
    legend(canvas, _LEFT[0], y + 14, {"whole on both": WHOLE})
    return Drawing(
        canvas,
        "A transformer block on two tensor-parallel ranks. Attention and MLP are cut: each rank has a half. The norms, "
        "dropouts and additions before, between and after them are whole on both ranks, all tokens with all features.",
    )
