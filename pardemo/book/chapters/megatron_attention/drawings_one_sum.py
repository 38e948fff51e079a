"""The gradients of X through W_q, W_k and W_v: added on the rank before the all-reduce, or after three of them."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, KEPT

_TALK, _GRADIENT = DONE["communication"], KEPT["gradients"]
#: Title, number of times f occurs.
WAYS = (("one f for all three", 1), ("an f for each", 3))
_ROW, _EACH, _HIGH = 186, 48, 38  # a way's height; from one projection to the next; a box


def one_sum_or_three() -> Drawing:
    """The backward pass of W_q, W_k, W_v on one rank: where gradients are added, and how often they are all-reduced."""
    canvas = Canvas(640, 2 * _ROW + 34)
    for number, (title, all_reduces) in enumerate(WAYS):
        top = 14 + number * _ROW
        canvas.text(10, top, title, size=20, anchor="start", bold=True)
        canvas.text(630, top, f"backward {2 * all_reduces}φ", size=20, anchor="end", fill=_TALK, bold=True)
        _way(canvas, top + 22, all_reduces)
    caption = "f, backward: an all-reduce of b·s·h numbers"
    canvas.text(10, 2 * _ROW + 16, caption, anchor="start", size=18)
    return Drawing(
        canvas,
        "Backward, each rank has three gradients of X, through W_q, W_k and W_v. With one f it adds them first and "
        "all-reduces the result: 2φ. With an f for each, it all-reduces all three and adds them then: 6φ.",
    )


def _way(canvas: Canvas, top: float, all_reduces: int) -> None:
    middle = top + _EACH + _HIGH / 2
    plus, f, end = (250, 390, 496) if all_reduces == 1 else (400, 250, 496)
    for row, letter in enumerate("qkv"):
        y = top + row * _EACH
        canvas.box(10, y, 150, _HIGH, _GRADIENT, f"through W_{letter}", size=18)
        if all_reduces == 3:
            _f(canvas, f, y)
        begin, level = (f + 64, y + _HIGH / 2) if all_reduces == 3 else (160, y + _HIGH / 2)
        if all_reduces == 3:
            canvas.arrow([(162, level), (f - 2, level)])
        canvas.arrow([(begin + 2, level), (plus - 2 - 8 * (row != 1), middle + (row - 1) * 14)])
    canvas.box(plus, middle - 22, 54, 44, "none", "+", size=26, thick=2)
    if all_reduces == 1:
        canvas.arrow([(plus + 56, middle), (f - 2, middle)])
        _f(canvas, f, middle - _HIGH / 2)
    canvas.arrow([((f + 64 if all_reduces == 1 else plus + 54) + 2, middle), (end - 2, middle)])
    canvas.box(end, middle - _HIGH / 2, 134, _HIGH, _GRADIENT, "X's gradient", size=18)


def _f(canvas: Canvas, x: float, y: float) -> None:
    canvas.box(x, y, 64, _HIGH, "none", "f: 2φ", size=18, border=_TALK, thick=3)
