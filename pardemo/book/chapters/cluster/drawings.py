"""An all-reduce over two hosts: by one ring over all ranks, and hierarchical, by hosts."""

from itertools import pairwise

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS

_SENT = DONE["communication"]
_HOST, _SIDE, _RANK = 236, 10, 56  # a host's width, the margin, a rank's side
_ROW = 188


def two_hosts() -> Drawing:
    """Four ranks on two hosts: bytes between the hosts with one ring and by hosts, in units of the tensor S."""
    canvas = Canvas(640, 12 + 2 * _ROW)
    _ring(canvas, 30)
    _by_hosts(canvas, 30 + _ROW)
    return Drawing(
        canvas,
        "Four ranks on two hosts. In one ring over all of them every link carries 1½ times the tensor, also the two "
        "that join the hosts. By hosts, ranks of a host first add halves among themselves, then each half is added "
        "between the hosts, then the halves are gathered inside: a host sends the tensor once.",
    )


def _hosts(canvas: Canvas, top: float, title: str) -> list[tuple[float, float]]:
    """Draws the hosts and their ranks; returns the middle of each rank."""
    canvas.text(_SIDE, top - 14, title, size=20, anchor="start", bold=True)
    middle = top + 82
    for host, left in enumerate((_SIDE, 640 - _SIDE - _HOST)):
        canvas.box(left, top + 6, _HOST, 152, thick=1.5)
        canvas.text(left + _HOST / 2, top + 143, f"host {host}", size=18)
    places = [_SIDE + 58, _SIDE + _HOST - 58, 640 - _SIDE - _HOST + 58, 640 - _SIDE - 58]
    for rank, x in enumerate(places):
        canvas.box(x - _RANK / 2, middle - _RANK / 2, _RANK, _RANK, RANKS[rank], str(rank), size=22, bold=True)
    return [(x, middle) for x in places]


def _ring(canvas: Canvas, top: float) -> None:
    ranks = _hosts(canvas, top, "one ring")
    half = _RANK / 2 + 3
    for (x, y), (to, _) in pairwise(ranks):
        canvas.arrow([(x + half, y), (to - half, y)], _SENT)
    (first, y), (last, _) = ranks[0], ranks[-1]
    above = top + 26
    canvas.arrow([(last, y - half), (last, above), (first, above), (first, y - half)], _SENT)
    canvas.text(320, y + 22, "1½ S", size=20, fill=_SENT, bold=True)
    canvas.text(320, above + 20, "1½ S", size=20, fill=_SENT, bold=True)


def _by_hosts(canvas: Canvas, top: float) -> None:
    ranks = _hosts(canvas, top, "by hosts")
    half = _RANK / 2 + 3
    for a, b in ((0, 1), (2, 3)):
        (x, y), (to, _) = ranks[a], ranks[b]
        canvas.arrow([(x + half, y), (to - half, y)], both=True)
    for a, b, way in ((0, 2, -1), (1, 3, 1)):
        (x, y), (to, _) = ranks[a], ranks[b]
        level = y + way * (_RANK / 2 + 16)
        canvas.arrow([(x, y + way * half), (x, level), (to, level), (to, y + way * half)], _SENT, both=True)
        canvas.text(320, level - way * 16, "½ S", size=20, fill=_SENT, bold=True)
