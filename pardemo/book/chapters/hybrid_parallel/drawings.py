"""Ranks in three dimensions: as a cube, on their hosts, and over the time of a step."""

from itertools import pairwise, product
from typing import TYPE_CHECKING

from pardemo.draw.canvas import Canvas, Drawing, drawing
from pardemo.draw.palette import DONE, KEPT, rank_colour
from pardemo.draw.rule import rule

if TYPE_CHECKING:
    from pardemo.groups import ParallelDims
_TENSOR, _DATA = KEPT["activations"], KEPT["gradients"]  # the colours of what travels; a pipeline hands on activations
_LEVEL = 16  # between lines that run side by side
_HIGH, _LABEL = 62, 104  # of a rank; the width of a node's name
_NAMES = {"dp": "replica", "pp": "stage"}


@drawing()
def cube(canvas: Canvas, tensor: int = 2, data: int = 2, pipeline: int = 2, ranks_per_host: int = 4) -> str:
    """The ranks in their nodes, and their groups by :class:`pardemo.groups.ParallelDims`.

    Args:
        tensor: t; a tensor-parallel group is a frame round its ranks. data: d, dashed lines. pipeline: p, arrows.
        ranks_per_host: 2 to 8, on up to 4 hosts.

    Raises:
        ValueError: more hosts or ranks than can be read, hosts that are not full, or a group that lies neither in one
            row nor in one column.
    """
    from pardemo.groups import ParallelDims  # in here: it brings torch

    layout = ParallelDims(tp=tensor, dp=data, pp=pipeline)
    hosts, remainder = divmod(layout.size, ranks_per_host) if ranks_per_host > 0 else (0, 0)
    if remainder or not 1 <= hosts <= 4 or not 2 <= ranks_per_host <= 8:
        raise ValueError(
            f"{layout.size} ranks on nodes of {ranks_per_host} cannot be drawn: up to 4 full nodes of 2 to 8 can"
        )
    plan = _Plan(layout, ranks_per_host)
    plan.check()
    kinds = sum(size > 1 for size in (tensor, data, pipeline))
    canvas.height = plan.top(hosts) - 6 + 34 * kinds
    for host in range(hosts):
        _host(canvas, plan, host)
    for group in layout.groups("tp") if tensor > 1 else ():
        x, y, right, bottom = plan.around(group)
        canvas.box(x - 9, y - 9, right - x + 18, bottom - y + 18, border=_TENSOR, thick=4)
    for rank in range(layout.size):
        x, y = plan.place(rank)
        where = layout.coordinates(rank)
        if plan.wide < 90:
            canvas.box(x, y, plan.wide, _HIGH, "none", str(rank), size=22, bold=True)
            continue
        canvas.box(x, y, plan.wide, _HIGH)
        canvas.text(x + plan.wide / 2, y + 19, str(rank), size=22, bold=True)
        label = f"t{where['tp']} d{where['dp']} p{where['pp']}"
        canvas.text(x + plan.wide / 2, y + 44, label)
    for axis, colour in (("dp", _DATA), ("pp", _TENSOR)):
        groups = layout.groups(axis)
        for group in groups if len(groups[0]) > 1 else ():
            _join(canvas, plan, group, colour, arrows=axis == "pp")
    _legend(canvas, plan.top(hosts) + 8, layout)
    return (
        f"{layout.size} ranks on {hosts} node{'s' * (hosts > 1)}. Tensor-parallel groups: "
        f"{_groups_text(layout, 'tp')}; data-parallel groups: {_groups_text(layout, 'dp')}; pipelines: "
        f"{_groups_text(layout, 'pp')}."
    )


class _Plan:
    """Where each rank is drawn."""

    def __init__(self, layout: "ParallelDims", ranks_per_host: int):
        self.layout, self.per_host = layout, ranks_per_host
        self.pitch = (622 - _LABEL) / ranks_per_host
        self.wide = min(100, self.pitch - 28)
        self.above = 22 + _LEVEL * self._lines("pp")  # room over the ranks of a node, and under them
        self.below = 22 + _LEVEL * self._lines("dp")

    def host(self, rank: int) -> int:
        return rank // self.per_host

    def top(self, host: int) -> float:
        return 4 + host * (self.above + _HIGH + self.below + 30)

    def place(self, rank: int) -> tuple[float, float]:
        """The upper left corner."""
        host, column = divmod(rank, self.per_host)
        return _LABEL + (column + 0.5) * self.pitch - self.wide / 2, self.top(host) + self.above

    def around(self, ranks: list[int]) -> tuple[float, float, float, float]:
        places = [self.place(rank) for rank in ranks]
        xs, ys = zip(*places, strict=True)
        return min(xs), min(ys), max(xs) + self.wide, max(ys) + _HIGH

    def in_row(self, group: list[int]) -> bool:
        return len({self.host(rank) for rank in group}) == 1

    def check(self) -> None:
        for axis in ("dp", "pp"):
            for group in self.layout.groups(axis):
                hosts = [self.host(rank) for rank in group]
                if len(set(hosts)) > 1 and hosts != list(range(hosts[0], hosts[0] + len(group))):
                    raise ValueError(f"the group {group} lies on nodes that are no neighbours, which cannot be drawn")
                if len(set(hosts)) > 1 and len({rank % self.per_host for rank in group}) > 1:
                    raise ValueError(f"the group {group} lies across nodes and columns, which cannot be drawn")
        t = self.layout.tp
        if t % self.per_host and self.per_host % t:
            raise ValueError(f"tensor-parallel groups of {t} do not fit nodes of {self.per_host}")

    def _lines(self, axis: str) -> int:
        groups = self.layout.groups(axis)
        if len(groups[0]) == 1:
            return 0
        return max(
            sum(self.in_row(group) and self.host(group[0]) == host for group in groups)
            for host in range(self.layout.size // self.per_host)
        )

    def level(self, axis: str, group: list[int]) -> int:
        """Which line of its node the group's is, counted from 0."""
        host_groups = [g for g in self.layout.groups(axis) if self.in_row(g) and self.host(g[0]) == self.host(group[0])]
        return host_groups.index(group)


def _host(canvas: Canvas, plan: _Plan, host: int) -> None:
    top = plan.top(host)
    canvas.box(4, top, 632, plan.top(host + 1) - top - 30, thick=2)
    coordinates = [plan.layout.coordinates(rank) for rank in range(host * plan.per_host, (host + 1) * plan.per_host)]
    cut = [axis for axis in ("pp", "dp") if getattr(plan.layout, axis) > 1]
    shared_labels = [
        f"{_NAMES[axis]} {coordinates[0][axis]}" for axis in cut if len({place[axis] for place in coordinates}) == 1
    ]
    middle = plan.place(host * plan.per_host)[1] + _HIGH / 2
    canvas.text(16, middle - 12 * len(shared_labels), f"node {host}", "start", bold=True, size=20)
    canvas.lines(16, middle - 12 * len(shared_labels) + 25, shared_labels, "start")


def _join(canvas: Canvas, plan: _Plan, group: list[int], colour: str, arrows: bool) -> None:
    """A group's line: within a node beside its ranks, between nodes from one to the next."""
    aside = (plan.wide / 4) * (1 if arrows else -1)
    at = [(x + plan.wide / 2 + aside, y) for x, y in (plan.place(rank) for rank in group)]
    if plan.in_row(group):
        level = plan.level("pp" if arrows else "dp", group)
        if arrows:
            y = at[0][1] - 20 - _LEVEL * level
            for (x0, y0), (x1, _) in pairwise(at):
                canvas.arrow([(x0, y0), (x0, y), (x1 - 8, y), (x1 - 8, y0)], colour)
            return
        y = at[0][1] + _HIGH + 20 + _LEVEL * level
        for x, top in at:
            canvas.line([(x, top + _HIGH), (x, y)], colour, 3, dashed=True)
        canvas.line([(at[0][0], y), (at[-1][0], y)], colour, 3, dashed=True)
        return
    for (x, y), (_, below) in pairwise(at):
        if arrows:
            canvas.arrow([(x, y + _HIGH), (x, below)], colour)
        else:
            canvas.line([(x, y + _HIGH), (x, below)], colour, 3, dashed=True)


def _legend(canvas: Canvas, y: float, layout: "ParallelDims") -> None:
    if layout.tp > 1:
        canvas.box(22, y - 11, 44, 22, border=_TENSOR, thick=4)
        canvas.text(80, y, "t  tensor: activations, in every layer", "start")
        y += 34
    if layout.dp > 1:
        canvas.line([(22, y), (66, y)], _DATA, 3, dashed=True)
        canvas.text(80, y, "d  data: gradients, once a step", "start")
        y += 34
    if layout.pp > 1:
        canvas.arrow([(22, y), (66, y)], _TENSOR)
        canvas.text(80, y, "p  pipeline: activations, to the next stage", "start")


def _groups_text(layout: "ParallelDims", axis: str) -> str:
    return ", ".join("-".join(map(str, group)) for group in layout.groups(axis))


def layout_choice() -> Drawing:
    """The whole rule, no line of it marked."""
    return rule()


if TYPE_CHECKING:
    from pardemo.groups import ParallelDims
_HEAD, _FRAME, _GAP, _ROW = 34, 296, 32, 34  # the row of replicas; a node's width; between nodes; a line of the legend
_WIDE, _SIDE, _RIGHT, _DOWN = 46, 34, 52, 42  # a rank, and how far the next one of its node stands
_ABOVE = 64  # of the ranks in their node: its name and its stage


@drawing()
def cube_on_hosts(canvas: Canvas, tensor: int = 4, order: str = "tp-dp-pp") -> str:
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
    high = _ABOVE + (tensor - 1) * _DOWN + _SIDE + 16
    canvas.height = _HEAD + 2 * high + _GAP + 22 + 3 * _ROW
    for column, stage in product(range(2), range(2)):
        left, top = _corner(column, stage, high)
        canvas.box(
            left,
            top,
            _FRAME,
            high,
            border=_TENSOR if tensor_inside else "",
            thick=4 if tensor_inside else 2,
        )
        host = stage * 2 + column
        canvas.lines(left + _FRAME - 12, top + 20, [f"node {host}", f"stage {stage}"], "end")
    for column in range(2):
        title = f"replica {column}" if tensor_inside else f"half {column} of each layer"
        canvas.text(_corner(column, 0, high)[0] + _FRAME / 2, 16, title, bold=True, size=20)
    places = {rank: _place(layout, rank, high) for rank in range(layout.size)}
    for first, second in layout.groups("dp" if tensor_inside else "tp"):
        (x, y), (to, _) = places[first], places[second]
        between = [(x + _WIDE, y + _SIDE / 2), (to, y + _SIDE / 2)]
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
        canvas.arrow([(x + _WIDE / 2, y + _SIDE), (x + _WIDE / 2, below)], both=True)
    for rank, (x, y) in places.items():
        canvas.box(x, y, _WIDE, _SIDE, rank_colour(layout.coordinates(rank)["tp"]), str(rank), size=22, bold=True)
    _hosts_legend(canvas, _HEAD + 2 * high + _GAP + 26, tensor_inside)
    groups_text = {
        axis: ", ".join("-".join(map(str, group)) for group in layout.groups(axis)) for axis in ("tp", "dp", "pp")
    }
    inside, between = ("each a node", "between replicas") if tensor_inside else ("between nodes", "each a node")
    return (
        f"{layout.size} ranks on four nodes of {tensor}. Tensor-parallel groups, {inside}: {groups_text['tp']}; "
        f"data-parallel groups, {between}: {groups_text['dp']}; pipelines, between stages: {groups_text['pp']}."
    )


def _corner(column: int, stage: int, high: float) -> tuple[float, float]:
    return 8 + column * (_FRAME + _GAP), _HEAD + stage * (high + _GAP)


def _place(layout: "ParallelDims", rank: int, high: float) -> tuple[float, float]:
    """The upper left corner of a rank: those of a node stand on a diagonal, so that no line meets another rank."""
    where = layout.coordinates(rank)
    inside, between, _ = layout.order.split("-")
    left, top = _corner(where[between], where["pp"], high)
    return left + 12 + where[inside] * _RIGHT, top + _ABOVE + where[inside] * _DOWN


def _hosts_legend(canvas: Canvas, y: float, tensor_inside: bool) -> None:
    if tensor_inside:
        canvas.box(22, y - 11, 44, 22, border=_TENSOR, thick=4)
    else:
        canvas.arrow([(22, y), (66, y)], _TENSOR, 4, both=True)
    label = (
        "a node, here a tensor group: activations, all-reduced"
        if tensor_inside
        else "tensor: activations, all-reduced in every layer"
    )
    canvas.text(80, y, label, "start")
    canvas.line([(22, y + _ROW), (66, y + _ROW)], _DATA, 3, dashed=True)
    canvas.text(80, y + _ROW, "data: gradients, all-reduced once a step", "start")
    canvas.arrow([(22, y + 2 * _ROW), (66, y + 2 * _ROW)], both=True)
    canvas.text(80, y + 2 * _ROW, "pipeline: activations down, gradients back", "start")


STAGES, MICRO_BATCHES, LAYERS = 2, 2, 2  # of a pipeline, of a step, of a stage
SUMS = 2  # of a layer, one for attention and one for the MLP, forward and as many backward
_LEFT, _UNIT, _BAR, _TOP, _LANE = (
    106,
    46,
    44,
    36,
    142,
)  # a row's begin; a forward's width and height; rows


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


@drawing()
def cube_step(canvas: Canvas) -> None:
    """One replica's step over time. Stage 0, ranks 0 and 1, computes two micro-batches forward, stage 1, ranks 4 and 5,
    computes each of them one box later, then both backward. Each box has four tensor-parallel all-reduces, an arrow
    hands an activation down or its gradient up, and at each stage's end gradients are all-reduced with the other
    replica."""
    canvas.height = _TOP + 2 * _LANE + 76
    canvas.text(_LEFT, 14, "two micro-batches forward, then back", "start")
    canvas.text(556, 14, "time", "end")
    canvas.arrow([(566, 14), (630, 14)], thick=2)
    course = times()
    for stage in range(STAGES):
        y = _TOP + stage * _LANE
        first = 4 * stage
        canvas.lines(8, y + 12, [f"stage {stage}", f"ranks {first}, {first + 1}"], "start")
        stage_spans = {key: span for key, span in course.items() if key[0] == stage}
        for (_, batch, direction), (begin, end) in stage_spans.items():
            x, wide = _LEFT + begin * _UNIT, (end - begin) * _UNIT
            canvas.box(x, y, wide, _BAR, DONE[direction], str(batch + 1), size=20)
            _all_reduces(canvas, x, y + _BAR + 5, wide)
        forward, back = (
            pick(span[end] for (_, _, direction), span in stage_spans.items() if direction == kind)
            for pick, end, kind in ((max, 1, "forward"), (min, 0, "backward"))
        )
        if back > forward:
            canvas.box(_LEFT + forward * _UNIT, y, (back - forward) * _UNIT, _BAR, DONE["idle"], "waits")
        done = max(end for _, end in stage_spans.values())
        x = _LEFT + done * _UNIT + 4
        canvas.box(x, y, 1.9 * _UNIT, _BAR, _DATA, "reduce")
    _edges(canvas, course)
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
    each = wide / count
    canvas.boxes([(x + (k + 0.5) * each - 3, y, 6, 18) for k in range(count)], _TENSOR, thick=0.8)


def _edges(canvas: Canvas, course: dict[tuple[int, int, str], tuple[int, int]]) -> None:
    upper, lower = _TOP + _BAR + 26, _TOP + _LANE - 3
    for batch in range(MICRO_BATCHES):
        x = _LEFT + course[0, batch, "forward"][1] * _UNIT
        canvas.arrow([(x - 6, upper), (x + 12, lower)])
        x = _LEFT + course[1, batch, "backward"][1] * _UNIT
        canvas.arrow([(x - 10, lower), (x + 10, upper)])
