"""Two nodes and their links, the collectives, and three algorithms of NCCL."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

from pardemo.draw.canvas import Canvas, Point, drawing
from pardemo.draw.palette import DONE, WHOLE, rank_colour
from pardemo.draw.parts import check_range
from pardemo.draw.player import Player

_TALK = DONE["communication"]


@drawing(262)
def two_machines(canvas: Canvas, inside: float, between: float) -> str:
    """Two of the nodes, with eight GPUs each.

    Args:
        inside: bytes a second of a GPU's link. between: of a node's network card.
    """
    inside, between = inside / 1e9, between / 1e9
    for node, left in enumerate((10, 350)):
        canvas.box(left, 30, 280, 168)
        canvas.text(left + 140, 14, f"node {node}", bold=True)
        for index in range(8):
            x, y = left + 22 + 64 * (index % 4), 46 + 82 * (index // 4)
            canvas.box(x, y, 44, 38, rank_colour(index), str(8 * node + index))
            canvas.line([(x + 22, y + 38 * (index < 4)), (x + 22, 106)], thick=3)
        canvas.line([(left + 16, 105), (left + 264, 105)], thick=10)
        canvas.text(left + 140, 183, f"NVLink: {inside:.0f} GB/s each")
    canvas.arrow([(150, 201), (150, 226), (490, 226), (490, 201)], _TALK, 3, both=True)
    canvas.text(320, 247, f"one network card each: {between:.3g} GB/s", fill=_TALK, bold=True)
    return (
        f"Two nodes of eight GPUs each. Inside a node each GPU has a link of {inside:.0f} GB/s to the others; "
        f"between the nodes, each has one network card of {between:.3g} GB/s."
    )


@drawing(680)
def ring_tree_chain(canvas: Canvas) -> None:
    """In a ring each rank sends to the next, round and round. In a chain each rank hands on to the next, once, and the
    last one closes no circle. In a tree the sum goes up from the leaves to the root and comes down again. NCCL has two
    trees, for half of the tensor each: ranks 2, 4 and 6 have two children in the first tree and are leaves in the
    second one, where ranks 1, 3 and 5 have two children."""
    ring = [(96, 84), (160, 84), (224, 84), (224, 148), (224, 212), (160, 212), (96, 212), (96, 148)]
    chain = [(416 + 64 * (place % 3), 84 + 64 * (place // 3)) for place in (0, 1, 2, 5, 4, 3, 6, 7)]
    for x, name, way, caption in (
        (160, "ring", "round", ["2(N − 1) messages,", "2(N − 1)/N·S a link"]),
        (480, "chain", "one way", ["N − 1 messages,", "S a link"]),
    ):
        canvas.text(x, 18, name, size=22, bold=True)
        canvas.text(x, 46, way)
        canvas.lines(x, 264, caption)
    _sends(canvas, dict(enumerate(ring)), [(rank, (rank + 1) % 8) for rank in range(8)])
    _sends(canvas, dict(enumerate(chain)), pairwise(range(8)))
    canvas.text(320, 344, "double tree", size=22, bold=True)
    canvas.text(320, 372, "up, and down, in both at once")
    # a rank's parent in NCCL's first tree of eight; the second tree is the first one, moved by one rank
    parents = {4: 0, 2: 4, 6: 4, 1: 2, 3: 2, 5: 6, 7: 6}
    levels = {0: 0, 4: 1, 2: 2, 6: 2, 1: 3, 3: 3, 5: 3, 7: 3}
    for moved, left, half in ((0, 26, "first"), (1, 348, "second")):
        points = {(p - moved) % 8: (left + 38 * ((p - moved) % 8), 408 + 64 * level) for p, level in levels.items()}
        links = [((place - moved) % 8, (parent - moved) % 8) for place, parent in parents.items()]
        _sends(canvas, points, links, side=32, both=True)
        canvas.text(left + 133, 632, f"{half} half of the tensor")
    canvas.text(320, 662, "2·log₂N messages")


def _sends(
    canvas: Canvas, places: Mapping[int, Point], links: Iterable[tuple[int, int]], side: float = 36, both: bool = False
) -> None:
    """Ranks at their places, and an arrow from the edge of a rank to the edge of another one for each link."""
    for rank, (x, y) in places.items():
        canvas.box(x - side / 2, y - side / 2, side, side, rank_colour(rank), str(rank))
    for sender, receiver in links:
        (x, y), (to, below) = places[sender], places[receiver]
        scale = (side / 2 + 3) / max(abs(to - x), abs(below - y))
        dx, dy = (to - x) * scale, (below - y) * scale
        canvas.arrow([(x + dx, y + dy), (to - dx, below - dy)], _TALK, 2.5, both=both)


#: (number, rank that it comes from, or None if it is a sum); None where a rank has nothing, or nothing of use.
Cell = tuple[int, int | None] | None
Table = list[list[Cell]]


def collectives(ranks: int = 4) -> Player:
    """Broadcast, reduce, all-reduce, reduce-scatter, all-gather, all-to-all, and a message, with N numbers on N ranks.

    Args:
        ranks: N, from 2 to 4; others raise a ValueError. Rank r begins with the numbers 10·r, 10·r + 1, …
    """
    check_range(ranks, 2, 4)
    everyone = range(ranks)
    table: Table = [[(10 * rank + place, rank) for place in everyone] for rank in everyone]
    sums: list[Cell] = [(sum(10 * rank + place for rank in everyone), None) for place in everyone]
    nothing: Table = [[None] * ranks] * ranks

    def only(row: list[Cell], number: int) -> list[Cell]:
        return [cell if number == at else None for at, cell in enumerate(row)]

    tables = {
        "broadcast": ([table[0], *nothing[1:]], [table[0]] * ranks, "everybody gets what rank 0 has."),
        "reduce": (table, [sums, *nothing[1:]], "rank 0 gets the sum of all, number by number."),
        "all-reduce": (table, [sums] * ranks, "everybody gets the sum."),
        "reduce-scatter": (
            table, [only(sums, rank) for rank in everyone], "everybody gets the sum of one part.",
        ),
        "all-gather": (
            [only(row, 0) for row in table], [[row[0] for row in table]] * ranks, "everybody gets everybody's part.",
        ),
        "all-to-all": (
            table, [[table[rank][place] for rank in everyone] for place in everyone],
            "part c of each rank goes to rank c: rows become columns.",
        ),
        "send and receive": (
            [table[0], *nothing[1:]], [table[0], table[0], *nothing[2:]],
            "rank 0 sends to rank 1 alone; a copy stays. This one is no collective: the others do not take part.",
        ),
    }  # fmt: skip
    frames = [(_tables(name, *both), f"{name.capitalize()}: {caption}") for name, (*both, caption) in tables.items()]
    return Player(frames, f"seven ways to talk, on {ranks} ranks", start=list(tables).index("all-reduce"))


def _tables(name: str, before: Table, after: Table) -> Canvas:
    ranks, wide, high = len(before), 52, 40  # of a number
    canvas = Canvas(640, 84 + 48 * ranks)
    canvas.text(320, 20, name, size=22, bold=True)
    for x, word, table in ((78, "before", before), (626 - ranks * wide, "after", after)):
        canvas.text(x + ranks * wide / 2, 56, word)
        for rank, cells in enumerate(table):
            y = 78 + 48 * rank
            if table is before:
                canvas.text(70, y + high / 2, f"rank {rank}", "end")
            for at, cell in zip(range(x, x + ranks * wide, wide), cells, strict=True):
                if cell is None:
                    canvas.box(at, y, wide, high, thick=1, dashed=True)
                else:
                    number, owner = cell
                    fill = WHOLE if owner is None else rank_colour(owner)
                    canvas.box(at, y, wide, high, fill, str(number), size=20, bold=owner is None)
    middle = 74 + 24 * ranks
    canvas.arrow([(96 + ranks * wide, middle), (608 - ranks * wide, middle)])
    return canvas
