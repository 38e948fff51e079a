"""Tensor, data and pipeline parallelism on four nodes: which groups lie inside a node, which between nodes."""

from itertools import product
from typing import TYPE_CHECKING

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import KEPT, rank_colour

if TYPE_CHECKING:
    from pardemo.groups import ParallelDims

_TENSOR, _DATA = KEPT["activations"], KEPT["gradients"]  # the colours of what travels
_HEAD, _FRAME, _GAP, _ROW = 34, 296, 32, 34  # the row of replicas; a node's width; between nodes; a line of the legend
_WIDE, _HIGH, _RIGHT, _DOWN = 46, 34, 52, 42  # a rank, and how far the next one of its node stands
_ABOVE = 64  # of the ranks in their node: its name and its stage


def cube_on_hosts(tensor: int = 4, order: str = "tp-dp-pp") -> Drawing:
    """2 replicas × 2 stages on four nodes: in the order tp-dp-pp a node is a tensor group, in dp-tp-pp a data group.

    Dashed lines join data-parallel ranks. Arrows with two heads, in the page's own colour, join the stages of a
    pipeline: activations go down, gradients back. A tensor group is a frame, or, between nodes, an arrow of the frame's
    colour. Ranks of one colour hold the same part of their layers.

    Args:
        tensor: ranks of a tensor group, 2 to 4; in the order dp-tp-pp 2.

    Raises:
        ValueError: another number of ranks, or another order, than can be drawn.
    """
    from pardemo.groups import ParallelDims  # in here: it brings torch

    if not 2 <= tensor <= 4:
        raise ValueError(f"2 to 4 ranks on a node can be drawn, not {tensor}")
    tensor_inside = order == "tp-dp-pp"
    if not tensor_inside and (order, tensor) != ("dp-tp-pp", 2):
        raise ValueError(f"tp-dp-pp can be drawn, or dp-tp-pp with tensor groups of 2, not {order} with {tensor}")
    layout = ParallelDims(tp=tensor, dp=2, pp=2, order=order)
    high = _ABOVE + (tensor - 1) * _DOWN + _HIGH + 16
    canvas = Canvas(640, _HEAD + 2 * high + _GAP + 22 + 3 * _ROW)
    for column, stage in product(range(2), range(2)):
        left, top = _corner(column, stage, high)
        canvas.box(left, top, _FRAME, high, border=_TENSOR if tensor_inside else "", thick=4 if tensor_inside else 2)
        host = stage * 2 + column
        canvas.lines(left + _FRAME - 12, top + 20, [f"node {host}", f"stage {stage}"], anchor="end")
    for column in range(2):
        title = f"replica {column}" if tensor_inside else f"half {column} of each layer"
        canvas.text(_corner(column, 0, high)[0] + _FRAME / 2, 16, title, bold=True)
    places = {rank: _place(layout, rank, high) for rank in range(layout.size)}
    for first, second in layout.groups("dp" if tensor_inside else "tp"):
        (x, y), (to, _) = places[first], places[second]
        between = [(x + _WIDE, y + _HIGH / 2), (to, y + _HIGH / 2)]
        if tensor_inside:
            canvas.line(between, _DATA, 3, dashed=True)
        else:
            canvas.arrow(between, _TENSOR, 4, both=True)
    # over the two ranks, so that only arrows' shafts are crossed
    for first, second in () if tensor_inside else layout.groups("dp"):
        (x, y), (to, below) = (places[rank] for rank in (first, second))
        at, end = x + 0.8 * _WIDE, to + 0.8 * _WIDE  # beside the pipeline's arrows
        way = [(at, y), (at, y - 16), (end, y - 16), (end, below)]
        canvas.line(way, _DATA, 3, dashed=True)
    for first, second in layout.groups("pp"):
        (x, y), (_, below) = places[first], places[second]
        canvas.arrow([(x + _WIDE / 2, y + _HIGH), (x + _WIDE / 2, below)], both=True)
    for rank, (x, y) in places.items():
        canvas.box(x, y, _WIDE, _HIGH, rank_colour(layout.coordinates(rank)["tp"]), str(rank), size=22, bold=True)
    _legend(canvas, _HEAD + 2 * high + _GAP + 26, tensor_inside)
    groups_text = {
        axis: ", ".join("-".join(map(str, group)) for group in layout.groups(axis)) for axis in ("tp", "dp", "pp")
    }
    inside, between = ("each a node", "between replicas") if tensor_inside else ("between nodes", "each a node")
    return Drawing(
        canvas,
        f"{layout.size} ranks on four nodes of {tensor}. Tensor-parallel groups, {inside}: {groups_text['tp']}; "
        f"data-parallel groups, {between}: {groups_text['dp']}; pipelines, between stages: {groups_text['pp']}.",
    )


def _corner(column: int, stage: int, high: float) -> tuple[float, float]:
    return 8 + column * (_FRAME + _GAP), _HEAD + stage * (high + _GAP)


def _place(layout: "ParallelDims", rank: int, high: float) -> tuple[float, float]:
    """The upper left corner of a rank: those of a node stand on a diagonal, so that no line meets another rank."""
    where = layout.coordinates(rank)
    inside, between, _ = layout.order.split("-")
    left, top = _corner(where[between], where["pp"], high)
    return left + 12 + where[inside] * _RIGHT, top + _ABOVE + where[inside] * _DOWN


def _legend(canvas: Canvas, y: float, tensor_inside: bool) -> None:
    if tensor_inside:
        canvas.box(22, y - 11, 44, 22, border=_TENSOR, thick=4)
    else:
        canvas.arrow([(22, y), (66, y)], _TENSOR, 4, both=True)
    label = (
        "a node, here a tensor group: activations, all-reduced"
        if tensor_inside
        else "tensor: activations, all-reduced in every layer"
    )
    canvas.text(80, y, label, size=18, anchor="start")
    canvas.line([(22, y + _ROW), (66, y + _ROW)], _DATA, 3, dashed=True)
    canvas.text(80, y + _ROW, "data: gradients, all-reduced once a step", size=18, anchor="start")
    canvas.arrow([(22, y + 2 * _ROW), (66, y + 2 * _ROW)], both=True)
    canvas.text(80, y + 2 * _ROW, "pipeline: activations down, gradients back", size=18, anchor="start")
