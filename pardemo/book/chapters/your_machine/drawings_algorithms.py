"""Three algorithms of NCCL: a ring, a tree, a chain."""

from itertools import pairwise

from pardemo.draw.canvas import Canvas, Drawing, Point
from pardemo.draw.palette import DONE, rank_colour

_SENT = DONE["communication"]
_SIDE = 36  # of a rank
_RING = ((40, 84), (104, 84), (168, 84), (168, 148), (168, 212), (104, 212), (40, 212), (40, 148))
_TREE = ((318, 84), (248, 148), (388, 148), (222, 212), (286, 212), (350, 212), (414, 212))
_CHAIN = tuple((488 + 64 * (place % 3), 84 + 64 * (place // 3)) for place in (0, 1, 2, 5, 4, 3, 6, 7))


def ring_tree_chain() -> Drawing:
    """A ring, a tree and a chain: who sends to whom, after how many messages, and how many bytes a link carries."""
    canvas = Canvas(640, 314)
    for x, name, caption in (
        (104, "ring", ["2(N − 1) messages,", "2(N − 1)/N·S a link"]),
        (318, "tree", ["2·log₂N messages,", "2·S a link at most"]),
        (552, "chain", ["N − 1 messages,", "S a link"]),
    ):
        canvas.text(x, 18, name, size=22, bold=True)
        canvas.text(x, 46, {"ring": "round", "tree": "up, and down", "chain": "one way"}[name], size=18)
        canvas.lines(x, 264, caption)
    _ranks(canvas, _RING)
    for rank, place in enumerate(_RING):
        _sends(canvas, place, _RING[(rank + 1) % len(_RING)])
    _ranks(canvas, _TREE)
    for rank, place in enumerate(_TREE[1:], 1):
        _sends(canvas, place, _TREE[(rank - 1) // 2], both=True)
    _ranks(canvas, _CHAIN)
    for place, after in pairwise(_CHAIN):
        _sends(canvas, place, after)
    return Drawing(
        canvas,
        "In a ring each rank sends to the next, round and round. In a tree the sum goes up from the leaves to the root "
        "and comes down again. In a chain each rank hands on to the next, once, and the last one closes no circle.",
    )


def _ranks(canvas: Canvas, places: tuple[Point, ...]) -> None:
    for rank, (x, y) in enumerate(places):
        canvas.box(x - _SIDE / 2, y - _SIDE / 2, _SIDE, _SIDE, rank_colour(rank), str(rank), size=18)


def _sends(canvas: Canvas, place: Point, after: Point, both: bool = False) -> None:
    """An arrow from the edge of a rank to the edge of another one."""
    (x, y), (to, below) = place, after
    scale = (_SIDE / 2 + 3) / max(abs(to - x), abs(below - y))
    dx, dy = (to - x) * scale, (below - y) * scale
    canvas.arrow([(x + dx, y + dy), (to - dx, below - dy)], _SENT, 2.5, both=both)
