"""Questions one below the other, each with the answer for a yes beside it."""

from collections.abc import Sequence

from pardemo.draw.canvas import Canvas
from pardemo.draw.palette import KEPT, RANKS, ink_on

WIDE, RIGHT, HIGH, GAP = 340, 470, 58, 30


def yes(canvas: Canvas, y: float, answer: Sequence[str], fill: str = RANKS[2]) -> None:
    box(canvas, RIGHT, y, 640 - RIGHT - 8, answer, fill)
    canvas.arrow([(8 + WIDE, y + HIGH / 2 + 14), (RIGHT, y + HIGH / 2 + 14)])
    canvas.text((8 + WIDE + RIGHT) / 2 - 6, y + HIGH / 2 - 4, "yes")


def box(
    canvas: Canvas, x: float, y: float, wide: float, lines: Sequence[str], fill: str = "none", high: float = HIGH
) -> None:
    border = "" if fill != "none" else KEPT["parameters"]
    canvas.box(x, y, wide, high, fill, border=border, thick=2)
    canvas.lines(x + wide / 2, y + high / 2 - 12 * (len(lines) - 1), lines, fill=ink_on(fill))


def down(canvas: Canvas, y: float, word: str = "") -> None:
    canvas.arrow([(60, y + HIGH), (60, y + HIGH + GAP)])
    if word:
        canvas.text(80, y + HIGH + GAP / 2, word, "start")
