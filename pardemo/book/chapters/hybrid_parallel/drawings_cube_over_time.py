"""A step of 3-D parallelism over time: what two stages compute, and when they communicate."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, KEPT

_TENSOR, _DATA = KEPT["activations"], KEPT["gradients"]  # as in the cube
STAGES, MICRO_BATCHES, LAYERS = 2, 2, 2  # of a pipeline, of a step, of a stage
SUMS = 2  # of a layer, one for attention and one for the MLP, forward and as many backward
_LEFT, _UNIT, _HIGH, _TOP, _ROW = 106, 46, 44, 36, 142  # a row's begin; a forward's width and height; rows


def times() -> dict[tuple[int, int, str], tuple[int, int]]:
    """(stage, micro-batch, "forward" or "backward") -> (begin, end); all forwards, of length 1, come first, then all
    backwards, of length 2."""
    spans: dict[tuple[int, int, str], tuple[int, int]] = {}
    for batch in range(MICRO_BATCHES):
        for stage in range(STAGES):
            begin = stage + batch
            spans[stage, batch, "forward"] = begin, begin + 1
    turn = STAGES - 1 + MICRO_BATCHES
    for batch in range(MICRO_BATCHES):
        for stage in reversed(range(STAGES)):
            begin = turn + 2 * (STAGES - 1 - stage + batch)
            spans[stage, batch, "backward"] = begin, begin + 2
    return spans


def cube_step() -> Drawing:
    """A step of one replica, ranks 0 and 1 (stage 0) and 4 and 5 (stage 1), and the all-reduce with the other one."""
    canvas = Canvas(640, _TOP + 2 * _ROW + 76)
    canvas.text(_LEFT, 14, "two micro-batches forward, then back", size=18, anchor="start")
    canvas.text(556, 14, "time", size=18, anchor="end")
    canvas.arrow([(566, 14), (630, 14)], thick=2)
    course = times()
    for stage in range(STAGES):
        y = _TOP + stage * _ROW
        first = 4 * stage
        canvas.lines(8, y + 12, [f"stage {stage}", f"ranks {first}, {first + 1}"], anchor="start")
        stage_spans = {key: span for key, span in course.items() if key[0] == stage}
        for (_, batch, direction), (begin, end) in stage_spans.items():
            x, wide = _LEFT + begin * _UNIT, (end - begin) * _UNIT
            canvas.box(x, y, wide, _HIGH, DONE[direction], str(batch + 1), size=20)
            _all_reduces(canvas, x, y + _HIGH + 5, wide)
        forward, back = (
            pick(span[end] for (_, _, direction), span in stage_spans.items() if direction == kind)
            for pick, end, kind in ((max, 1, "forward"), (min, 0, "backward"))
        )
        if back > forward:
            canvas.box(_LEFT + forward * _UNIT, y, (back - forward) * _UNIT, _HIGH, DONE["idle"], "waits", size=18)
        done = max(end for _, end in stage_spans.values())
        x = _LEFT + done * _UNIT + 4
        canvas.box(x, y, 1.9 * _UNIT, _HIGH, _DATA, "reduce", size=18)
    _edges(canvas, course)
    y = _TOP + 2 * _ROW - 28
    _all_reduces(canvas, 14, y - 10, 52)
    canvas.text(80, y - 1, "tensor: 4 all-reduces inside a node; the layer waits", size=18, anchor="start")
    canvas.arrow([(40, y + 20), (40, y + 46)])
    canvas.text(80, y + 32, "pipeline: other micro-batches go on meanwhile", size=18, anchor="start")
    canvas.box(14, y + 56, 52, 22, _DATA)
    canvas.text(80, y + 67, "data: once, between replicas; the optimizer waits", size=18, anchor="start")
    return Drawing(
        canvas,
        "One replica's step over time. Stage 0, ranks 0 and 1, computes two micro-batches forward, stage 1, ranks 4 "
        "and 5, computes each of them one box later, then both backward. Each box has four tensor-parallel "
        "all-reduces, an arrow hands an activation down or its gradient up, and at each stage's end gradients are "
        "all-reduced with the other replica.",
    )


def _all_reduces(canvas: Canvas, x: float, y: float, wide: float) -> None:
    """The tensor-parallel all-reduces inside one box, spread over its width."""
    count = SUMS * LAYERS
    each = wide / count
    canvas.boxes([(x + (k + 0.5) * each - 3, y, 6, 18) for k in range(count)], _TENSOR, thick=0.8)


def _edges(canvas: Canvas, course: dict[tuple[int, int, str], tuple[int, int]]) -> None:
    upper, lower = _TOP + _HIGH + 26, _TOP + _ROW - 3
    for batch in range(MICRO_BATCHES):
        x = _LEFT + course[0, batch, "forward"][1] * _UNIT
        canvas.arrow([(x - 6, upper), (x + 12, lower)])
        x = _LEFT + course[1, batch, "backward"][1] * _UNIT
        canvas.arrow([(x - 10, lower), (x + 10, upper)])
