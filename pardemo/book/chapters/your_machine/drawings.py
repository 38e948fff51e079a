"""Two nodes and their links, the collectives, and three algorithms of NCCL."""

from itertools import pairwise

from pardemo.draw.canvas import Canvas, Point, drawing
from pardemo.draw.palette import DONE, WHOLE, rank_colour
from pardemo.draw.player import Player

_TALK = DONE["communication"]


@drawing(262)
def two_machines(canvas: Canvas, inside: float, between: float) -> str:
    """Sixteen GPUs in two nodes.

    Args:
        inside: bytes a second of a GPU's link. between: of a node's network card.
    """
    inside, between = inside / 1e9, between / 1e9
    for node, left in enumerate((10, 350)):
        canvas.box(left, 30, 280, 168)
        canvas.text(left + 140, 14, f"node {node}", bold=True)
        for place in range(8):
            x, y = left + 22 + 64 * (place % 4), 46 + 82 * (place // 4)
            canvas.box(x, y, 44, 38, rank_colour(place), str(8 * node + place))
            canvas.line([(x + 22, y + 38), (x + 22, 106)] if place < 4 else [(x + 22, y), (x + 22, 106)], thick=3)
        canvas.line([(left + 16, 105), (left + 264, 105)], thick=10)
        canvas.text(left + 140, 183, f"NVLink: {inside:.0f} GB/s each")
    canvas.arrow([(150, 201), (150, 226), (490, 226), (490, 201)], _TALK, 3, both=True)
    canvas.text(320, 247, f"one network card each: {between:.3g} GB/s", fill=_TALK, bold=True)
    return (
        f"Sixteen GPUs in two nodes of eight. Inside a node each GPU has a link of {inside:.0f} GB/s to the others; "
        f"between the nodes, each has one network card of {between:.3g} GB/s."
    )


_SIDE = 36  # of a rank
_RING = ((96, 84), (160, 84), (224, 84), (224, 148), (224, 212), (160, 212), (96, 212), (96, 148))
_CHAIN = tuple((416 + 64 * (place % 3), 84 + 64 * (place // 3)) for place in (0, 1, 2, 5, 4, 3, 6, 7))
#: A rank's parent in NCCL's first tree of eight; the second tree is the first one, moved by one rank.
_PARENT = {4: 0, 2: 4, 6: 4, 1: 2, 3: 2, 5: 6, 7: 6}
_LEVEL = {0: 0, 4: 1, 2: 2, 6: 2, 1: 3, 3: 3, 5: 3, 7: 3}
_TREES = 344  # the height at which they begin


@drawing(680)
def ring_tree_chain(canvas: Canvas) -> None:
    """In a ring each rank sends to the next, round and round. In a chain each rank hands on to the next, once, and the
    last one closes no circle. In a tree the sum goes up from the leaves to the root and comes down again. NCCL has two
    trees, for half of the tensor each: ranks 2, 4 and 6 have two children in the first tree and are leaves in the
    second one, where ranks 1, 3 and 5 have two children."""
    for x, name, way, caption in (
        (160, "ring", "round", ["2(N − 1) messages,", "2(N − 1)/N·S a link"]),
        (480, "chain", "one way", ["N − 1 messages,", "S a link"]),
    ):
        canvas.text(x, 18, name, size=22, bold=True)
        canvas.text(x, 46, way)
        canvas.lines(x, 264, caption)
    _ranks(canvas, dict(enumerate(_RING)))
    for rank, place in enumerate(_RING):
        _sends(canvas, place, _RING[(rank + 1) % len(_RING)])
    _ranks(canvas, dict(enumerate(_CHAIN)))
    for place, after in pairwise(_CHAIN):
        _sends(canvas, place, after)
    canvas.text(320, _TREES, "double tree", size=22, bold=True)
    canvas.text(320, _TREES + 28, "up, and down, in both at once")
    for moved, left in ((0, 26), (1, 348)):
        _tree(canvas, left, moved)
        canvas.text(left + 133, _TREES + 288, f"{('first', 'second')[moved]} half of the tensor")
    canvas.text(320, _TREES + 318, "2·log₂N messages")


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
        canvas.box(x - side / 2, y - side / 2, side, side, rank_colour(rank), str(rank))


def _sends(canvas: Canvas, place: Point, after: Point, both: bool = False, side: float = _SIDE) -> None:
    """An arrow from the edge of a rank to the edge of another one."""
    (x, y), (to, below) = place, after
    scale = (side / 2 + 3) / max(abs(to - x), abs(below - y))
    dx, dy = (to - x) * scale, (below - y) * scale
    canvas.arrow([(x + dx, y + dy), (to - dx, below - dy)], _TALK, 2.5, both=both)


_CELL, _HIGH, _TOP, _LEFT = 52, 40, 78, 78
#: (number, rank that it comes from, or None if it is a sum); None where a rank has nothing, or nothing of use.
Cell = tuple[int, int | None] | None
Table = list[list[Cell]]


def collectives(ranks: int = 4) -> Player:
    """Broadcast, reduce, all-reduce, reduce-scatter, all-gather, all-to-all, and a message, with N numbers on N ranks.

    Args:
        ranks: N, from 2 to 4. Rank r begins with the numbers 10·r, 10·r + 1, …

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 4:
        raise ValueError(f"collectives of 2 to 4 ranks can be drawn, not of {ranks}")
    everyone = range(ranks)
    whole: Table = [[(10 * rank + place, rank) for place in everyone] for rank in everyone]
    sums: list[Cell] = [(sum(10 * rank + place for rank in everyone), None) for place in everyone]
    nothing: list[Cell] = [None] * ranks

    def only(row: list[Cell], places: list[int]) -> list[Cell]:
        return [cell if place in places else None for place, cell in enumerate(row)]

    own_parts = [only(whole[rank], [0]) for rank in everyone]
    others = range(1, ranks)
    tables = {
        "broadcast": (
            [whole[0], *[nothing for _ in others]], [whole[0]] * ranks, "everybody gets what rank 0 has.",
        ),
        "reduce": (whole, [sums, *[nothing for _ in others]], "rank 0 gets the sum of all, number by number."),
        "all-reduce": (whole, [sums] * ranks, "everybody gets the sum."),
        "reduce-scatter": (
            whole, [only(sums, [rank]) for rank in everyone], "everybody gets the sum of one part.",
        ),
        "all-gather": (
            own_parts, [[whole[rank][0] for rank in everyone]] * ranks, "everybody gets everybody's part.",
        ),
        "all-to-all": (
            whole, [[whole[rank][place] for rank in everyone] for place in everyone],
            "part c of each rank goes to rank c: rows become columns.",
        ),
        "send and receive": (
            [whole[0], *[nothing for _ in others]], [whole[0], whole[0], *[nothing for _ in others[1:]]],
            "rank 0 sends to rank 1 alone; a copy stays. This one is no collective: the others do not take part.",
        ),
    }  # fmt: skip
    frames = [
        (_frame(name, before, after), f"{name.capitalize()}: {caption}")
        for name, (before, after, caption) in tables.items()
    ]
    return Player(frames, f"seven ways to talk, on {ranks} ranks", start=list(tables).index("all-reduce"))


def _frame(name: str, before: Table, after: Table) -> Canvas:
    ranks = len(before)
    canvas = Canvas(640, _TOP + ranks * (_HIGH + 8) + 6)
    wide = ranks * _CELL
    right = 640 - 14 - wide
    canvas.text(320, 20, name, size=22, bold=True)
    for x, word in ((_LEFT, "before"), (right, "after")):
        canvas.text(x + wide / 2, 56, word)
    for rank in range(ranks):
        y = _TOP + rank * (_HIGH + 8)
        canvas.text(_LEFT - 8, y + _HIGH / 2, f"rank {rank}", "end")
        _row(canvas, _LEFT, y, before[rank])
        _row(canvas, right, y, after[rank])
    middle = _TOP + ranks * (_HIGH + 8) / 2 - 4
    canvas.arrow([(_LEFT + wide + 18, middle), (right - 18, middle)])
    return canvas


def _row(canvas: Canvas, x: float, y: float, cells: list[Cell]) -> None:
    for place, cell in enumerate(cells):
        at = x + place * _CELL
        if cell is None:
            canvas.box(at, y, _CELL, _HIGH, thick=1, dashed=True)
            continue
        number, owner = cell
        fill = WHOLE if owner is None else rank_colour(owner)
        canvas.box(at, y, _CELL, _HIGH, fill, str(number), size=20, bold=owner is None)
