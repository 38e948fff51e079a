"""Draws what a trace's bars say: bars inside of bars, and an all-reduce beside them."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import COMPUTED, DONE, OTHER

_LEFT, _UNIT, _HIGH = 20, 10, 40  # a millisecond's width; a bar's height
#: name, depth, begin and end in ms
BARS = (("backward", 0, 0, 52), ("a layer's gradients", 1, 2, 26), ("matmul", 2, 3, 13), ("matmul", 2, 14, 24),
        ("another's", 1, 27, 38), ("matmul", 2, 28, 36))  # fmt: skip
ALL_REDUCE = (26, 50)  # of the first layer's gradients


@drawing(336)
def nested_bars(canvas: Canvas) -> None:
    """Bars of one thread, three deep: backward contains two layers' gradients, and these contain matrix
    multiplications; at its end backward has nothing inside and waits. Below, on another thread, an all-reduce: hidden
    beside the second layer's gradients, exposed in what is left."""
    canvas.text(_LEFT, 14, "the thread that runs your program", "start")
    for name, depth, begin, end in BARS:
        x, y = _LEFT + 11 * begin, 32 + depth * (_HIGH + 6)
        fill = (DONE["backward"], OTHER, COMPUTED)[depth]
        canvas.box(x, y, 11 * (end - begin), _HIGH, fill, name)
    last = max(end for _, depth, _, end in BARS if depth == 1)
    top = 32 + 3 * (_HIGH + 6)
    canvas.text(_LEFT + 11 * (last + 7), 32 + 1.5 * _HIGH + 6, "nothing inside")
    canvas.text(_LEFT + 11 * (last + 7), 32 + 2.1 * _HIGH + 6, "of it: it waits")
    canvas.text(_LEFT, top + 28, "another thread", "start")
    begin, end = ALL_REDUCE
    canvas.box(_LEFT + 11 * begin, top + 44, 11 * (end - begin), _HIGH, DONE["communication"], "all-reduce")
    y = top + 44 + _HIGH + 14
    for first, until, word in ((begin, last, "hidden"), (last, end, "exposed")):
        canvas.line([(_LEFT + 11 * first + 2, y), (_LEFT + 11 * until - 2, y)], thick=3)
        canvas.text(_LEFT + 11 * (first + until) / 2, y + 20, word, bold=word == "exposed")
