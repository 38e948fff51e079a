"""An all-reduce over two nodes: by one ring over all ranks, and hierarchical, by nodes."""

from itertools import pairwise

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS

_SENT = DONE["communication"]
_NODE, _SIDE, _RANK = 236, 10, 56  # a node's width, the margin, a rank's side
_ROW = 188


def two_nodes() -> Drawing:
    """Four ranks on two nodes: bytes between the nodes with one ring and by nodes, in units of the tensor S."""
    canvas = Canvas(640, 12 + 2 * _ROW)
    _ring(canvas, 30)
    _by_nodes(canvas, 30 + _ROW)
    return Drawing(
        canvas,
        "Four ranks on two nodes. In one ring over all of them every link carries 1½ times the tensor, also the two "
        "that join the nodes. By nodes, ranks of a node first add halves among themselves, then each half is added "
        "between the nodes, then the halves are gathered inside: a node sends the tensor once.",
    )


def _nodes(canvas: Canvas, top: float, title: str) -> list[tuple[float, float]]:
    """Draws the nodes and their ranks; returns the middle of each rank."""
    canvas.text(_SIDE, top - 14, title, size=20, anchor="start", bold=True)
    middle = top + 82
    for node, left in enumerate((_SIDE, 640 - _SIDE - _NODE)):
        canvas.box(left, top + 6, _NODE, 152, thick=1.5)
        canvas.text(left + _NODE / 2, top + 143, f"node {node}", size=18)
    places = [_SIDE + 58, _SIDE + _NODE - 58, 640 - _SIDE - _NODE + 58, 640 - _SIDE - 58]
    for rank, x in enumerate(places):
        canvas.box(x - _RANK / 2, middle - _RANK / 2, _RANK, _RANK, RANKS[rank], str(rank), size=22, bold=True)
    return [(x, middle) for x in places]


def _ring(canvas: Canvas, top: float) -> None:
    ranks = _nodes(canvas, top, "one ring")
    half = _RANK / 2 + 3
    for (x, y), (to, _) in pairwise(ranks):
        canvas.arrow([(x + half, y), (to - half, y)], _SENT)
    (first, y), (last, _) = ranks[0], ranks[-1]
    above = top + 26
    canvas.arrow([(last, y - half), (last, above), (first, above), (first, y - half)], _SENT)
    canvas.text(320, y + 22, "1½ S", size=20, fill=_SENT, bold=True)
    canvas.text(320, above + 20, "1½ S", size=20, fill=_SENT, bold=True)


def _by_nodes(canvas: Canvas, top: float) -> None:
    ranks = _nodes(canvas, top, "by nodes")
    half = _RANK / 2 + 3
    for a, b in ((0, 1), (2, 3)):
        (x, y), (to, _) = ranks[a], ranks[b]
        canvas.arrow([(x + half, y), (to - half, y)], both=True)
    for a, b, way in ((0, 2, -1), (1, 3, 1)):
        (x, y), (to, _) = ranks[a], ranks[b]
        level = y + way * (_RANK / 2 + 16)
        canvas.arrow([(x, y + way * half), (x, level), (to, level), (to, y + way * half)], _SENT, both=True)
        canvas.text(320, level - way * 16, "½ S", size=20, fill=_SENT, bold=True)
