"""A weight that the first and the last layer share: its gradient in one process, and with two stages."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, KEPT

_TALK, _WEIGHT, _GRADIENT = DONE["communication"], KEPT["parameters"], KEPT["gradients"]
_FIRST, _LAST, _WIDE = 104, 432, 84  # where embedding and output layer stand, and how wide they are


def tied_weights() -> Drawing:
    """One matrix E as embedding and output layer: in one process both uses add to one gradient; on two ranks each has
    its own part, and an all-reduce adds them."""
    canvas = Canvas(640, 420)
    canvas.text(4, 14, "one process: one E, one gradient", size=18, anchor="start", bold=True)
    _layers(canvas, 34)
    canvas.box(212, 34, 196, 44, "none", "blocks", size=18)
    canvas.box(_FIRST, 114, _LAST + _WIDE - _FIRST, 38, _GRADIENT, "E's gradient: both uses add to it", size=18)
    canvas.text(4, 184, "two stages: each has its own E and sees its own use", size=18, anchor="start", bold=True)
    for rank, x in enumerate((92, 324)):
        canvas.text(x + 102, 212, f"rank {rank}", size=18, bold=True)
        canvas.box(x, 226, 204, 136, thick=1, dashed=True)
    _layers(canvas, 234)
    for x in (212, 336):
        canvas.box(x, 234, 72, 44, "none", "blocks", size=18)
    canvas.arrow([(287, 256), (333, 256)], _TALK)
    first, last = _FIRST + _WIDE / 2, _LAST + _WIDE / 2
    for x in (_FIRST, _LAST):
        canvas.box(x, 314, _WIDE, 38, _GRADIENT, "a part", size=18)
    canvas.arrow([(first, 356), (first, 386), (last, 386), (last, 356)], _TALK, 4, both=True)
    canvas.text(310, 406, "all-reduce: the parts are added", size=18, fill=_TALK, bold=True)
    return Drawing(
        canvas,
        "A matrix E that is embedding and output layer. In one process it has one gradient, to which both uses add. "
        "In two stages each rank has its own E and its own part of the gradient, and an all-reduce adds the parts.",
    )


def _layers(canvas: Canvas, y: float) -> None:
    """Tokens, E, …, E, loss, and an arrow from each E down to its gradient."""
    canvas.text(4, y + 22, "tokens", size=18, anchor="start")
    canvas.arrow([(70, y + 22), (_FIRST - 3, y + 22)], thick=2.5)
    for x in (_FIRST, _LAST):
        canvas.box(x, y, _WIDE, 44, _WEIGHT, "E", size=22)
        canvas.arrow([(x + _WIDE / 2, y + 47), (x + _WIDE / 2, y + 78)], _GRADIENT)
    for left, right in ((_FIRST + _WIDE + 3, 209), (411, _LAST - 3), (_LAST + _WIDE + 3, 556)):
        canvas.arrow([(left, y + 22), (right, y + 22)], thick=2.5)
    canvas.text(564, y + 22, "loss", size=18, anchor="start")
