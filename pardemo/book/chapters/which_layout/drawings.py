"""What a training step's time is made of: the step of one stage, a micro-batch of it, a layer of that."""

from collections.abc import Sequence

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import COMPUTED, DONE, KEPT, OTHER

_TALK, _IDLE = DONE["communication"], DONE["idle"]
_LEFT, _HIGH, _ROW = 8.0, 50, 142
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


@drawing()
def step_parts(canvas: Canvas) -> None:
    """A step of one stage: bubble, m micro-batches, bubble, the all-reduce of gradients, the update. A micro-batch:
    receive, l/p layers, send. A layer: matrix multiplications, attention, an all-reduce over t ranks, passes through
    memory, matrix multiplications, an all-reduce, passes through memory."""
    canvas.height = 30 + 2 * _ROW + _HIGH + 40
    titles = (
        "one step, as one stage of the pipeline sees it",
        "one micro-batch, forward (backward takes twice as long)",
        "one layer on one of t ranks",
    )
    zoomed = None
    for number, (title, row) in enumerate(zip(titles, (_STEP, _MICRO, _LAYER), strict=True)):
        top = 34.0 + number * _ROW
        ends = _boxes(canvas, top, row)
        if zoomed is not None:
            left, right, below = zoomed
            canvas.line([(left, below), (_LEFT, top - 30)], OTHER, 1.5, dashed=True)
            canvas.line([(right, below), (ends[-1], top - 30)], OTHER, 1.5, dashed=True)
        canvas.text(_LEFT, top - 16, title, "start", bold=True)
        zoomed = ends[1], ends[2], top + _HIGH
    canvas.text(
        _LEFT, 34 + 2 * _ROW + _HIGH + 18, "GEMMs: matrix multiplications; memory: norms, GeLU, residuals", "start"
    )


def _boxes(canvas: Canvas, top: float, row: Sequence[tuple[float, str, str]]) -> list[float]:
    """Draws a row; where each box begins, and where the last one ends."""
    at, begins = _LEFT, []
    for width, colour, text in row:
        canvas.box(at, top, width, _HIGH, colour, text)
        begins.append(at)
        at += width
    return [*begins, at]
