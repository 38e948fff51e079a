"""The groups of 3-D parallelism on their nodes."""

from itertools import pairwise
from typing import TYPE_CHECKING

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import KEPT

if TYPE_CHECKING:
    from pardemo.groups import ParallelDims

_TENSOR, _DATA = KEPT["activations"], KEPT["gradients"]  # the colours of what travels; a pipeline hands on activations
_LEVEL = 16  # between lines that run side by side
_HIGH, _LABEL = 62, 104  # of a rank; the width of a node's name
_NAMES = {"dp": "replica", "pp": "stage"}


def cube(tensor: int = 2, data: int = 2, pipeline: int = 2, ranks_per_host: int = 4) -> Drawing:
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
    canvas = Canvas(640, plan.top(hosts) - 6 + 34 * kinds)
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
        canvas.text(x + plan.wide / 2, y + 44, label, size=18)
    for axis, colour in (("dp", _DATA), ("pp", _TENSOR)):
        groups = layout.groups(axis)
        for group in groups if len(groups[0]) > 1 else ():
            _join(canvas, plan, group, colour, arrows=axis == "pp")
    _legend(canvas, plan.top(hosts) + 8, layout)
    return Drawing(
        canvas,
        f"{layout.size} ranks on {hosts} node{'s' * (hosts > 1)}. Tensor-parallel groups: "
        f"{_groups_text(layout, 'tp')}; data-parallel groups: {_groups_text(layout, 'dp')}; pipelines: "
        f"{_groups_text(layout, 'pp')}.",
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
    canvas.text(16, middle - 12 * len(shared_labels), f"node {host}", anchor="start", bold=True)
    canvas.lines(16, middle - 12 * len(shared_labels) + 25, shared_labels, anchor="start")


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
        canvas.text(80, y, "t  tensor: activations, in every layer", size=18, anchor="start")
        y += 34
    if layout.dp > 1:
        canvas.line([(22, y), (66, y)], _DATA, 3, dashed=True)
        canvas.text(80, y, "d  data: gradients, once a step", size=18, anchor="start")
        y += 34
    if layout.pp > 1:
        canvas.arrow([(22, y), (66, y)], _TENSOR)
        canvas.text(80, y, "p  pipeline: activations, to the next stage", size=18, anchor="start")


def _groups_text(layout: "ParallelDims", axis: str) -> str:
    return ", ".join("-".join(map(str, group)) for group in layout.groups(axis))
