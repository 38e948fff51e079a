"""Gradients in 8 bits on two nodes: which parts a rank holds before the first hop, between the two, and at the end."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, rank_colour

_TALK = DONE["communication"]
NODES, PLACES = 2, 2
_CELL, _HIGH, _X = 40, 40, (106, 342, 548)  # a part's box; where each column begins
_TOP, _ROW, _NODE = 74, 58, 158  # the first rank's row; from row to row; from node to node

#: What a rank holds at first, after one hop, after both.
_COLUMNS = (("all parts,", "its samples"), ("its place's parts,", "sum of its node"), ("its part,", "the sum"))


def held(rank: int, hops: int) -> list[int]:
    """The parts that a rank holds after so many hops; a part has the number of the rank that ends with its sum."""
    if hops == 0:
        return list(range(NODES * PLACES))
    if hops == 1:
        return [part for part in range(NODES * PLACES) if part % PLACES == rank % PLACES]
    return [rank]


def two_hops() -> Drawing:
    """A sum of gradients in two all-to-alls: inside each node, then between ranks of one place."""
    canvas = Canvas(640, _TOP + 2 * _NODE + 24)
    for x, lines in zip((_X[0], 312, 512), _COLUMNS, strict=True):
        canvas.lines(x, 14, lines, anchor="start")
    for node in range(NODES):
        y = _TOP + node * _NODE - 12
        canvas.box(4, y, 632, 2 * _ROW + 10, thick=1.5)
        canvas.text(630, y + 2 * _ROW + 24, f"node {node}", size=18, anchor="end")
    for rank in range(NODES * PLACES):
        canvas.text(14, _middle(rank), f"rank {rank}", size=18, anchor="start")
        for hops, x in enumerate(_X):
            for place, part in enumerate(held(rank, hops)):
                canvas.box(x + place * _CELL, _middle(rank) - _HIGH / 2, _CELL, _HIGH, rank_colour(part), str(part))
    for hop in (0, 1):
        for sender in range(NODES * PLACES):
            for receiver in partners(sender, hop):
                begin = _X[hop] + len(held(sender, hop)) * _CELL + 4
                canvas.arrow([(begin, _middle(sender)), (_X[hop + 1] - 4, _middle(receiver))], _TALK, 3)
    label = "arrows: rounded to 8 bits"
    canvas.text(14, _TOP + 2 * _NODE - 14, label, size=18, anchor="start", fill=_TALK, bold=True)
    return Drawing(
        canvas,
        "Four ranks on two nodes add gradients in two hops. First the ranks of a node swap: place 0 gets parts 0 and "
        "2, place 1 parts 1 and 3, summed over the node. Then ranks of one place swap between the nodes, and each "
        "ends with the sum of the part that has its number. Only the second hop leaves a node.",
    )


def partners(rank: int, hop: int) -> list[int]:
    """To whom a rank sends in a hop: the others of its node, then the others of its place."""
    ranks = [other for other in range(NODES * PLACES) if other != rank]
    if hop == 0:
        return [other for other in ranks if other // PLACES == rank // PLACES]
    return [other for other in ranks if other % PLACES == rank % PLACES]


def _middle(rank: int) -> float:
    return _TOP + rank // PLACES * _NODE + rank % PLACES * _ROW + _HIGH / 2 - 5
