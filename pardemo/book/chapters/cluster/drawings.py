"""Links inside and between nodes, three placements of a job on them, and what is sent in place of a gradient."""

from itertools import pairwise

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, ink_on

_TALK = DONE["communication"]
_NODE, _SIDE, _RANK = 236, 10, 56  # a node's width, the margin, a rank's side
_ROW = 188


@drawing()
def two_nodes(canvas: Canvas) -> None:
    """Four ranks on two nodes. In one ring over all of them every link carries 1½ times the tensor, also the two that
    join the nodes. By nodes, ranks of a node first add halves among themselves, then each half is added between the
    nodes, then the halves are gathered inside: a node sends the tensor once."""
    canvas.height = 12 + 2 * _ROW
    _ring(canvas, 30)
    _by_nodes(canvas, 30 + _ROW)


def _nodes(canvas: Canvas, top: float, title: str) -> list[tuple[float, float]]:
    """Draws the nodes and their ranks; returns the middle of each rank."""
    canvas.text(_SIDE, top - 14, title, "start", size=20, bold=True)
    middle = top + 82
    for node, left in enumerate((_SIDE, 640 - _SIDE - _NODE)):
        canvas.box(left, top + 6, _NODE, 152, thick=1.5)
        canvas.text(left + _NODE / 2, top + 143, f"node {node}")
    places = [_SIDE + 58, _SIDE + _NODE - 58, 640 - _SIDE - _NODE + 58, 640 - _SIDE - 58]
    for rank, x in enumerate(places):
        canvas.box(x - _RANK / 2, middle - _RANK / 2, _RANK, _RANK, RANKS[rank], str(rank), size=22, bold=True)
    return [(x, middle) for x in places]


def _ring(canvas: Canvas, top: float) -> None:
    ranks = _nodes(canvas, top, "one ring")
    half = _RANK / 2 + 3
    for (x, y), (to, _) in pairwise(ranks):
        canvas.arrow([(x + half, y), (to - half, y)], _TALK)
    (first, y), (last, _) = ranks[0], ranks[-1]
    above = top + 26
    canvas.arrow([(last, y - half), (last, above), (first, above), (first, y - half)], _TALK)
    canvas.text(320, y + 22, "1½ S", size=20, fill=_TALK, bold=True)
    canvas.text(320, above + 20, "1½ S", size=20, fill=_TALK, bold=True)


def _by_nodes(canvas: Canvas, top: float) -> None:
    ranks = _nodes(canvas, top, "by nodes")
    half = _RANK / 2 + 3
    for a, b in ((0, 1), (2, 3)):
        (x, y), (to, _) = ranks[a], ranks[b]
        canvas.arrow([(x + half, y), (to - half, y)], both=True)
    for a, b, way in ((0, 2, -1), (1, 3, 1)):
        (x, y), (to, _) = ranks[a], ranks[b]
        level = y + way * (_RANK / 2 + 16)
        canvas.arrow([(x, y + way * half), (x, level), (to, level), (to, y + way * half)], _TALK, both=True)
        canvas.text(320, level - way * 16, "½ S", size=20, fill=_TALK, bold=True)


_PLACE_NODE, _PLACE_SIDE, _PLACE_RANK, _PLACE_ROW = 210, 10, 46, 132
#: Title -> (label below each node's ranks), what a node sends to the other one in a step.
_WAYS = {
    "tensor inside, data across": (("activations", "activations"), "gradients: 8 MiB, once"),
    "tensor across, data inside": (("gradients", "gradients"), "activations: 32 MiB, in 16 all-reduces"),
    "tensor inside, pipeline across": (("layers 1 and 2", "layers 3 and 4"), "activations: 2 MiB, in 2 parts"),
}


@drawing()
def three_placements(canvas: Canvas) -> str:
    """Three placements of a step of four layers, with the bytes that a node's network card sends in each."""
    canvas.height = 8 + len(_WAYS) * _PLACE_ROW
    for number, (title, texts) in enumerate(_WAYS.items()):
        _way(canvas, 24 + number * _PLACE_ROW, title, *texts)
    values_text = "; ".join(f"{title}: {across}" for title, (_, across) in _WAYS.items())
    return f"Four ranks on two nodes, three ways. A node sends to the other one in a step: {values_text}."


def _way(canvas: Canvas, top: float, title: str, inside: tuple[str, str], across: str) -> None:
    canvas.text(_PLACE_SIDE, top - 8, title, "start", size=20, bold=True)
    middle, half = top + 48, _PLACE_RANK / 2 + 3
    lefts = (_PLACE_SIDE, 640 - _PLACE_SIDE - _PLACE_NODE)
    for left, words in zip(lefts, inside, strict=True):
        canvas.box(left, top + 10, _PLACE_NODE, 92, thick=1.5)
        canvas.text(left + _PLACE_NODE / 2, top + 90, words)
    places = [lefts[0] + 46, lefts[0] + _PLACE_NODE - 46, lefts[1] + 46, lefts[1] + _PLACE_NODE - 46]
    for rank, x in enumerate(places):
        canvas.box(
            x - _PLACE_RANK / 2,
            middle - _PLACE_RANK / 2,
            _PLACE_RANK,
            _PLACE_RANK,
            RANKS[rank],
            str(rank),
            size=20,
            bold=True,
        )
    for a, b in ((0, 1), (2, 3)):
        canvas.arrow([(places[a] + half, middle), (places[b] - half, middle)], both=True)
    begin, end = lefts[0] + _PLACE_NODE + 4, lefts[1] - 4
    for shift in (-9, 9):  # one for each rank of a node
        canvas.arrow([(begin, middle + shift), (end, middle + shift)], _TALK, both=True)
    kind, amount = across.split(": ")
    canvas.text(320, middle - 28, kind, fill=_TALK, bold=True)
    for number, words in enumerate(amount.split(", ")):
        canvas.text(320, middle + 28 + 22 * number, words, fill=_TALK, bold=True)


_GRADIENT, _TOP, _HIGH = KEPT["gradients"], 66, 190  # the matrix's height


@drawing()
def sent_instead(canvas: Canvas, rows: int, columns: int, directions: int, every: int) -> str:
    """Four ways to exchange a gradient of rows × columns numbers of 4 bytes; areas are in proportion to a step's bytes.

    Args:
        directions: columns of PowerSGD's two factors. every: steps between two exchanges of the last way.

    Raises:
        ValueError: a matrix whose parts would not be readable: one side twice the other, or too many directions.
    """
    if not 0.5 < columns / rows < 2 or directions * 4 > min(rows, columns):
        raise ValueError(f"{rows} × {columns} numbers by {directions} directions cannot be drawn")
    unit = min(_HIGH / rows, 156 / columns)  # of a number of 4 bytes, each way
    high, wide, thin = rows * unit, columns * unit, directions * unit
    whole = 4 * rows * columns
    ways = {
        "each step": (96, whole, "4 bytes each"),
        "int8": (246, whole / 4, "1 byte each"),
        "PowerSGD": (396, 4 * directions * (rows + columns), "P and Qᵀ"),
        f"every {every} steps": (548, whole / every, f"1/{every} a step"),
    }
    canvas.height = _TOP + high + 68
    for name, (middle, nbytes, note) in ways.items():
        canvas.text(middle, 16, name, size=20, bold=True)
        canvas.text(middle, _TOP + high + 22, f"{nbytes / 1e3:.3g} kB", size=20)
        canvas.text(middle, _TOP + high + 48, note)
    canvas.box(96 - wide / 2, _TOP, wide, high, _GRADIENT)
    canvas.text(96, _TOP + high / 2 - 14, "M", size=24, fill=ink_on(_GRADIENT))
    canvas.text(96, _TOP + high / 2 + 16, f"{rows} × {columns}", fill=ink_on(_GRADIENT))
    canvas.box(246 - wide / 8, _TOP, wide / 4, high, _GRADIENT)
    left = 396 - (wide + thin + 26) / 2
    canvas.box(left, _TOP, thin, high, _GRADIENT, thick=1)
    canvas.text(left + thin + 13, _TOP + high / 2, "·", size=24)
    canvas.box(left + thin + 26, _TOP + high / 2 - thin / 2, wide, thin, _GRADIENT, thick=1)
    canvas.box(548 - wide / every / 2, _TOP, wide / every, high, _GRADIENT)
    canvas.text(left + thin / 2, _TOP - 18, "P", size=20)
    canvas.text(left + thin + 26 + wide / 2, _TOP + high / 2 - 24, "Qᵀ", size=20)
    values_text = ", ".join(f"{name} {nbytes / 1e3:.3g} kB" for name, (_, nbytes, _) in ways.items())
    return (
        f"What is exchanged of a gradient M of {rows} × {columns} numbers in a step, areas to scale: {values_text}. "
        f"In 8 bits a number has one byte, not four; PowerSGD sends P, {directions} columns, and Qᵀ, {directions} "
        f"rows; the last way sends as much as M, but in one step of {every}."
    )
