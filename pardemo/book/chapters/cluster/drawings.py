"""Links inside and between nodes, three placements of a job on them, and what is sent in place of a gradient."""

from itertools import pairwise

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, ink_on

_TALK = DONE["communication"]


@drawing(388)
def two_nodes(canvas: Canvas) -> None:
    """Four ranks on two nodes. In one ring over all of them every link carries 1½ times the tensor, also the two that
    join the nodes. By nodes, ranks of a node first add halves among themselves, then each half is added between the
    nodes, then the halves are gathered inside: a node sends the tensor once."""
    for top, title in ((30, "one ring"), (218, "by nodes")):
        middle, half = top + 82, 31
        places = _nodes(canvas, top, title, 236, 152, 58, 56, middle, ("node 0", "node 1"), size=22)
        for a, b in pairwise(places) if top == 30 else (places[:2], places[2:]):
            canvas.arrow([(a + half, middle), (b - half, middle)], *[_TALK] * (top == 30), both=top != 30)
        if top == 30:
            first, last, above = places[0], places[-1], top + 26
            canvas.arrow([(last, middle - half), (last, above), (first, above), (first, middle - half)], _TALK)
            canvas.text(320, middle + 22, "1½ S", size=20, fill=_TALK, bold=True)
            canvas.text(320, above + 20, "1½ S", size=20, fill=_TALK, bold=True)
            continue
        for a, b, way in ((places[0], places[2], -1), (places[1], places[3], 1)):
            end, level = middle + way * half, middle + way * 44
            canvas.arrow([(a, end), (a, level), (b, level), (b, end)], _TALK, both=True)
            canvas.text(320, level - way * 16, "½ S", size=20, fill=_TALK, bold=True)


def _nodes(
    canvas: Canvas, top: float, title: str, wide: float, high: float, edge: float, side: float, middle: float,
    labels: tuple[str, str], size: float,
) -> list[float]:  # fmt: skip
    """Draws two nodes and their four ranks; returns the middle of each rank."""
    lefts = (10, 630 - wide)
    for left, label in zip(lefts, labels, strict=True):
        canvas.box(left, top + 6, wide, high, thick=1.5)
        canvas.text(left + wide / 2, top + high - 9, label)
    canvas.text(10, top - 14, title, "start", size=20, bold=True)
    places = [left + at for left in lefts for at in (edge, wide - edge)]
    for rank, x in enumerate(places):
        canvas.box(x - side / 2, middle - side / 2, side, side, RANKS[rank], str(rank), size=size, bold=True)
    return places


@drawing(404)
def three_placements(canvas: Canvas) -> str:
    """Three placements of a step of four layers, with the bytes that a node's network card sends in each."""
    ways = {
        "tensor inside, data across": (("activations", "activations"), "gradients: 8 MiB, once"),
        "tensor across, data inside": (("gradients", "gradients"), "activations: 32 MiB, in 16 all-reduces"),
        "tensor inside, pipeline across": (("layers 1 and 2", "layers 3 and 4"), "activations: 2 MiB, in 2 parts"),
    }
    for number, (title, (inside, across)) in enumerate(ways.items()):
        top = 30 + 132 * number
        middle = top + 42
        places = _nodes(canvas, top, title, 210, 92, 46, 46, middle, inside, size=20)
        for a, b in (places[:2], places[2:]):
            canvas.arrow([(a + 26, middle), (b - 26, middle)], both=True)
        for shift in (-9, 9):  # one for each rank of a node
            canvas.arrow([(224, middle + shift), (416, middle + shift)], _TALK, both=True)
        kind, amount = across.split(": ")
        canvas.text(320, middle - 28, kind, fill=_TALK, bold=True)
        canvas.lines(320, middle + 28, amount.split(", "), fill=_TALK, bold=True)
    values_text = "; ".join(f"{title}: {across}" for title, (_, across) in ways.items())
    return f"Four ranks on two nodes, three ways. A node sends to the other one in a step: {values_text}."


@drawing()
def sent_instead(canvas: Canvas, rows: int, columns: int, directions: int, every: int) -> str:
    """Three ways to exchange a gradient of rows × columns numbers of 4 bytes; areas are to scale.

    Args:
        directions: columns of PowerSGD's two factors. every: steps between two exchanges of the last way.

    Raises:
        ValueError: a matrix whose parts would not be readable: one side twice the other, or too many directions.
    """
    fill, top = KEPT["gradients"], 66
    if not 0.5 < columns / rows < 2 or directions * 4 > min(rows, columns):
        raise ValueError(f"{rows} × {columns} numbers by {directions} directions cannot be drawn")
    unit = min(190 / rows, 156 / columns)  # of a number of 4 bytes, each way
    high, wide, thin = rows * unit, columns * unit, directions * unit
    matrix = 4 * rows * columns
    ways = {
        "each step": (110, matrix, "4 bytes each"),
        "PowerSGD": (340, 4 * directions * (rows + columns), "P and Qᵀ"),
        f"every {every} steps": (540, matrix / every, f"1/{every} a step"),
    }
    canvas.height = top + high + 68
    for name, (middle, nbytes, note) in ways.items():
        canvas.text(middle, 16, name, size=20, bold=True)
        canvas.text(middle, top + high + 22, f"{nbytes / 1e3:.3g} kB", size=20)
        canvas.text(middle, top + high + 48, note)
    canvas.box(110 - wide / 2, top, wide, high, fill)
    canvas.text(110, top + high / 2 - 14, "M", size=24, fill=ink_on(fill))
    canvas.text(110, top + high / 2 + 16, f"{rows} × {columns}", fill=ink_on(fill))
    left = 340 - (wide + thin + 26) / 2
    canvas.box(left, top, thin, high, fill, thick=1)
    canvas.text(left + thin + 13, top + high / 2, "·", size=24)
    canvas.box(left + thin + 26, top + high / 2 - thin / 2, wide, thin, fill, thick=1)
    canvas.box(540 - wide / every / 2, top, wide / every, high, fill)
    canvas.text(left + thin / 2, top - 18, "P", size=20)
    canvas.text(left + thin + 26 + wide / 2, top + high / 2 - 24, "Qᵀ", size=20)
    values_text = ", ".join(f"{name} {nbytes / 1e3:.3g} kB" for name, (_, nbytes, _) in ways.items())
    return (
        f"What is exchanged of a gradient M of {rows} × {columns} numbers in a step, areas to scale: {values_text}. "
        f"PowerSGD sends P, {directions} columns, and Qᵀ, {directions} rows; the last way sends as much as M, but in "
        f"one step of {every}."
    )
