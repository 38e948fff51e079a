"""Draws what a training step's time is made of: the step of one stage, a micro-batch of it, a layer of that."""

from itertools import accumulate

from pardemo.book.page.rule import rule
from pardemo.draw.canvas import Canvas, Drawing, drawing
from pardemo.draw.palette import COMPUTED, DONE, KEPT, OTHER

_TALK, _IDLE = DONE["communication"], DONE["idle"]
#: Boxes of each row: width, colour, text.
_STEP = (
    (76, _IDLE, "bubble"), (62, COMPUTED, "1"), (62, COMPUTED, "2"), (62, COMPUTED, "…"), (62, COMPUTED, "m"),
    (76, _IDLE, "bubble"), (118, _TALK, "gradients"), (88, KEPT["optimizer states"], "update"),
)  # fmt: skip
_MICRO = (
    (100, _TALK, "receive"), (100, COMPUTED, "layer 1"), (100, COMPUTED, "layer 2"), (66, COMPUTED, "…"),
    (110, COMPUTED, "layer l/p"), (84, _TALK, "send"),
)  # fmt: skip
_LAYER = (
    (78, COMPUTED, "GEMMs"), (100, COMPUTED, "attention"), (98, _TALK, "all-reduce"), (84, COMPUTED, "memory"),
    (78, COMPUTED, "GEMMs"), (98, _TALK, "all-reduce"), (84, COMPUTED, "memory"),
)  # fmt: skip


def layout_choice() -> Drawing:
    """The whole rule, no line of it marked."""
    return rule()


@drawing(404)
def step_parts(canvas: Canvas) -> None:
    """A step of one stage: bubble, m micro-batches, bubble, the all-reduce of gradients, the update. A micro-batch:
    receive, l/p layers, send. A layer: matrix multiplications, attention, an all-reduce over t ranks, passes through
    memory, matrix multiplications, an all-reduce, passes through memory."""
    rows = {
        "one step, as one stage of the pipeline sees it": _STEP,
        "one micro-batch, forward (backward takes twice as long)": _MICRO,
        "one layer on one of t ranks": _LAYER,
    }
    left, high, zoomed = 8, 50, []  # zoomed: the ends of the box that the next row shows closer
    for number, (title, row) in enumerate(rows.items()):
        top = 34 + 142 * number
        ends = list(accumulate((width for width, _, _ in row), initial=left))
        for x, (width, colour, text) in zip(ends, row, strict=False):
            canvas.box(x, top, width, high, colour, text)
        for begin, end in zip(zoomed, (left, ends[-1]), strict=False):
            canvas.line([(begin, top - 142 + high), (end, top - 30)], OTHER, 1.5, dashed=True)
        canvas.text(left, top - 16, title, "start", bold=True)
        zoomed = ends[1:3]
    canvas.text(left, 386, "GEMMs: matrix multiplications; memory: norms, GeLU, residuals", "start")
