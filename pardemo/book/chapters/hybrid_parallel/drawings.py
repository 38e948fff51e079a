"""Ranks in three dimensions: on their hosts, and over the time of a step."""

from itertools import product

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, rank_colour
from pardemo.draw.parts import check_range

_TENSOR, _DATA = KEPT["activations"], KEPT["gradients"]  # the colours of what travels; a pipeline hands on activations


@drawing()
def cube_on_hosts(canvas: Canvas, tensor: int = 4, order: str = "tp-dp-pp") -> str:
    """2 replicas × 2 stages on four nodes: in the order tp-dp-pp a node is a tensor group, in dp-tp-pp a data group.

    Dashed lines join data-parallel ranks. Arrows with two heads, in the page's own colour, join the stages of a
    pipeline: activations go down, gradients back. A tensor group is a frame, or, between nodes, an arrow of the frame's
    colour. Ranks of one colour hold the same part of their layers.

    Args:
        tensor: ranks of a tensor group, 2 to 4; in the order dp-tp-pp 2. Others raise a ValueError.
    """
    from pardemo.groups import ParallelDims  # in here: it brings torch

    check_range(tensor, 2, 4, "ranks on a node")
    tensor_inside = order == "tp-dp-pp"
    if not tensor_inside and (order, tensor) != ("dp-tp-pp", 2):
        raise ValueError(f"tp-dp-pp can be drawn, or dp-tp-pp with tensor groups of 2, not {order} with {tensor}")
    layout = ParallelDims(tp=tensor, dp=2, pp=2, order=order)
    inner, outer, _ = order.split("-")
    wide, side = 46, 34  # of a rank
    frame, high = 296, 114 + (tensor - 1) * 42  # of a node
    corners = {
        (column, stage): (8 + column * 328, 34 + stage * (high + 32)) for column, stage in product((0, 1), (0, 1))
    }
    canvas.height = 190 + 2 * high
    for (column, stage), (left, top) in corners.items():
        border, thick = (_TENSOR, 4) if tensor_inside else ("", 2)
        canvas.box(left, top, frame, high, border=border, thick=thick)
        canvas.lines(left + frame - 12, top + 20, [f"node {stage * 2 + column}", f"stage {stage}"], "end")
    for column in range(2):
        title = f"replica {column}" if tensor_inside else f"half {column} of each layer"
        canvas.text(corners[column, 0][0] + frame / 2, 16, title, bold=True, size=20)
    places = {}  # the ranks of a node stand on a diagonal, so that no line meets another rank
    for rank in range(layout.size):
        where = layout.coordinates(rank)
        left, top = corners[where[outer], where["pp"]]
        places[rank] = left + 12 + where[inner] * 52, top + 64 + where[inner] * 42
    for first, second in layout.groups("dp" if tensor_inside else "tp"):
        (x, y), (right, _) = places[first], places[second]
        between = [(x + wide, y + side / 2), (right, y + side / 2)]
        if tensor_inside:
            canvas.line(between, _DATA, 3, dashed=True)
        else:
            canvas.arrow(between, _TENSOR, 4, both=True)
    # over the two ranks, so that only arrows' shafts are crossed
    for first, second in () if tensor_inside else layout.groups("dp"):
        (x, y), (right, below) = (places[rank] for rank in (first, second))
        at, end = x + 0.8 * wide, right + 0.8 * wide  # beside the pipeline's arrows
        way = [(at, y), (at, y - 16), (end, y - 16), (end, below)]
        canvas.line(way, _DATA, 3, dashed=True)
    for first, second in layout.groups("pp"):
        (x, y), (_, below) = places[first], places[second]
        canvas.arrow([(x + wide / 2, y + side), (x + wide / 2, below)], both=True)
    for rank, (x, y) in places.items():
        canvas.box(x, y, wide, side, rank_colour(layout.coordinates(rank)["tp"]), str(rank), size=22, bold=True)
    y = 92 + 2 * high
    label = "tensor: activations, all-reduced in every layer"
    if tensor_inside:
        canvas.box(22, y - 11, 44, 22, border=_TENSOR, thick=4)
        label = "a node, here a tensor group: activations, all-reduced"
    else:
        canvas.arrow([(22, y), (66, y)], _TENSOR, 4, both=True)
    canvas.line([(22, y + 34), (66, y + 34)], _DATA, 3, dashed=True)
    canvas.arrow([(22, y + 68), (66, y + 68)], both=True)
    pipeline = "pipeline: activations down, gradients back"
    for line, text in enumerate((label, "data: gradients, all-reduced once a step", pipeline)):
        canvas.text(80, y + 34 * line, text, "start")
    groups_text = {
        axis: ", ".join("-".join(map(str, group)) for group in layout.groups(axis)) for axis in ("tp", "dp", "pp")
    }
    inside, between = ("each a node", "between replicas") if tensor_inside else ("between nodes", "each a node")
    return (
        f"{layout.size} ranks on four nodes of {tensor}. Tensor-parallel groups, {inside}: {groups_text['tp']}; "
        f"data-parallel groups, {between}: {groups_text['dp']}; pipelines, between stages: {groups_text['pp']}."
    )


STAGES, MICRO_BATCHES, LAYERS = 2, 2, 2  # of a pipeline, of a step, of a stage
SUMS = 2  # of a layer, one for attention and one for the MLP, forward and as many backward
_LEFT, _UNIT, _BAR, _TOP, _LANE = 106, 46, 44, 36, 142  # a row's begin; a forward's width and height; rows


def times() -> dict[tuple[int, int, str], tuple[int, int]]:
    """(stage, micro-batch, "forward" or "backward") -> (begin, end); all forwards, of length 1, come first, then all
    backwards, of length 2."""
    spans = {(stage, k, "forward"): (stage + k, stage + k + 1) for stage in range(STAGES) for k in range(MICRO_BATCHES)}
    for stage, k in product(range(STAGES), range(MICRO_BATCHES)):
        begin = STAGES - 1 + MICRO_BATCHES + 2 * (STAGES - 1 - stage + k)
        spans[stage, k, "backward"] = begin, begin + 2
    return spans


@drawing(396)
def cube_step(canvas: Canvas) -> None:
    """One replica's step over time. Stage 0, ranks 0 and 1, computes two micro-batches forward, stage 1, ranks 4 and 5,
    computes each of them one box later, then both backward. Each box has four tensor-parallel all-reduces, an arrow
    hands an activation down or its gradient up, and at each stage's end gradients are all-reduced with the other
    replica."""
    canvas.text(_LEFT, 14, "two micro-batches forward, then back", "start")
    canvas.text(556, 14, "time", "end")
    canvas.arrow([(566, 14), (630, 14)], thick=2)
    course = times()
    for stage in range(STAGES):
        y = _TOP + stage * _LANE
        canvas.lines(8, y + 12, [f"stage {stage}", f"ranks {4 * stage}, {4 * stage + 1}"], "start")
        stage_spans = {key: span for key, span in course.items() if key[0] == stage}
        for (_, batch, direction), (begin, end) in stage_spans.items():
            x, wide = _LEFT + begin * _UNIT, (end - begin) * _UNIT
            canvas.box(x, y, wide, _BAR, DONE[direction], str(batch + 1), size=20)
            _all_reduces(canvas, x, y + _BAR + 5, wide)
        forward, back = course[stage, MICRO_BATCHES - 1, "forward"][1], course[stage, 0, "backward"][0]
        if back > forward:
            canvas.box(_LEFT + forward * _UNIT, y, (back - forward) * _UNIT, _BAR, DONE["idle"], "waits")
        done = course[stage, MICRO_BATCHES - 1, "backward"][1]
        canvas.box(_LEFT + done * _UNIT + 4, y, 1.9 * _UNIT, _BAR, _DATA, "reduce")
    upper, lower = _TOP + _BAR + 26, _TOP + _LANE - 3
    for batch in range(MICRO_BATCHES):
        x = _LEFT + course[0, batch, "forward"][1] * _UNIT
        canvas.arrow([(x - 6, upper), (x + 12, lower)])
        x = _LEFT + course[1, batch, "backward"][1] * _UNIT
        canvas.arrow([(x - 10, lower), (x + 10, upper)])
    y = _TOP + 2 * _LANE - 28
    _all_reduces(canvas, 14, y - 10, 52)
    canvas.text(80, y - 1, "tensor: 4 all-reduces inside a node; the layer waits", "start")
    canvas.arrow([(40, y + 20), (40, y + 46)])
    canvas.text(80, y + 32, "pipeline: other micro-batches go on meanwhile", "start")
    canvas.box(14, y + 56, 52, 22, _DATA)
    canvas.text(80, y + 67, "data: once, between replicas; the optimizer waits", "start")


def _all_reduces(canvas: Canvas, x: float, y: float, wide: float) -> None:
    """The tensor-parallel all-reduces inside one box, spread over its width."""
    count = SUMS * LAYERS
    canvas.boxes([(x + (k + 0.5) * wide / count - 3, y, 6, 18) for k in range(count)], _TENSOR, thick=0.8)
