"""Three algorithms of NCCL: a ring, a chain, and two trees that carry half of the tensor each."""

from itertools import pairwise

from pardemo.draw.canvas import Canvas, Drawing, Point
from pardemo.draw.palette import DONE, rank_colour

_SENT = DONE["communication"]
_SIDE = 36  # of a rank
_RING = ((96, 84), (160, 84), (224, 84), (224, 148), (224, 212), (160, 212), (96, 212), (96, 148))
_CHAIN = tuple((416 + 64 * (place % 3), 84 + 64 * (place // 3)) for place in (0, 1, 2, 5, 4, 3, 6, 7))
#: A rank's parent in NCCL's first tree of eight; the second tree is the first one, moved by one rank.
_PARENT = {4: 0, 2: 4, 6: 4, 1: 2, 3: 2, 5: 6, 7: 6}
_LEVEL = {0: 0, 4: 1, 2: 2, 6: 2, 1: 3, 3: 3, 5: 3, 7: 3}
_TREES = 344  # the height at which they begin


def ring_tree_chain() -> Drawing:
    """A ring, a chain and NCCL's double tree: who sends to whom, and after how many messages."""
    canvas = Canvas(640, 680)
    for x, name, way, caption in (
        (160, "ring", "round", ["2(N − 1) messages,", "2(N − 1)/N·S a link"]),
        (480, "chain", "one way", ["N − 1 messages,", "S a link"]),
    ):
        canvas.text(x, 18, name, size=22, bold=True)
        canvas.text(x, 46, way, size=18)
        canvas.lines(x, 264, caption)
    _ranks(canvas, dict(enumerate(_RING)))
    for rank, place in enumerate(_RING):
        _sends(canvas, place, _RING[(rank + 1) % len(_RING)])
    _ranks(canvas, dict(enumerate(_CHAIN)))
    for place, after in pairwise(_CHAIN):
        _sends(canvas, place, after)
    canvas.text(320, _TREES, "double tree", size=22, bold=True)
    canvas.text(320, _TREES + 28, "up, and down, in both at once", size=18)
    for moved, left in ((0, 26), (1, 348)):
        _tree(canvas, left, moved)
        canvas.text(left + 133, _TREES + 288, f"{('first', 'second')[moved]} half of the tensor", size=18)
    canvas.text(320, _TREES + 318, "2·log₂N messages", size=18)
    return Drawing(
        canvas,
        "In a ring each rank sends to the next, round and round. In a chain each rank hands on to the next, once, and "
        "the last one closes no circle. In a tree the sum goes up from the leaves to the root and comes down again. "
        "NCCL has two trees, for half of the tensor each: ranks 2, 4 and 6 have two children in the first tree and "
        "are leaves in the second one, where ranks 1, 3 and 5 have two children.",
    )


def _tree(canvas: Canvas, left: float, moved: int) -> None:
    """The tree of eight ranks: places stand from left to right, the root at the top; rank r has place r + ``moved``."""
    across = {(place - moved) % 8: place for place in _LEVEL}
    points = {rank: (left + 38 * rank, _TREES + 64 + 64 * _LEVEL[place]) for rank, place in across.items()}
    ranks = {place: rank for rank, place in across.items()}
    for place, parent in _PARENT.items():
        _sends(canvas, points[ranks[place]], points[ranks[parent]], both=True, side=32)
    _ranks(canvas, points, 32)


def _ranks(canvas: Canvas, places: dict[int, Point], side: float = _SIDE) -> None:
    for rank, (x, y) in places.items():
        canvas.box(x - side / 2, y - side / 2, side, side, rank_colour(rank), str(rank), size=18)


def _sends(canvas: Canvas, place: Point, after: Point, both: bool = False, side: float = _SIDE) -> None:
    """An arrow from the edge of a rank to the edge of another one."""
    (x, y), (to, below) = place, after
    scale = (side / 2 + 3) / max(abs(to - x), abs(below - y))
    dx, dy = (to - x) * scale, (below - y) * scale
    canvas.arrow([(x + dx, y + dy), (to - dx, below - dy)], _SENT, 2.5, both=both)
