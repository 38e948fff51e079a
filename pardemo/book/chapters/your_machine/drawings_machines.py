"""Two nodes of eight GPUs, and the bandwidths inside and between them."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, rank_colour

_SENT = DONE["communication"]


def two_machines(inside: float, between: float) -> Drawing:
    """Sixteen GPUs in two nodes.

    Args:
        inside: bytes a second of a GPU's link. between: of a node's network card.
    """
    inside, between = inside / 1e9, between / 1e9
    canvas = Canvas(640, 262)
    for node, left in enumerate((10, 350)):
        canvas.box(left, 30, 280, 168)
        canvas.text(left + 140, 14, f"node {node}", size=18, bold=True)
        for place in range(8):
            x, y = left + 22 + 64 * (place % 4), 46 + 82 * (place // 4)
            canvas.box(x, y, 44, 38, rank_colour(place), str(8 * node + place), size=18)
            canvas.line([(x + 22, y + 38), (x + 22, 106)] if place < 4 else [(x + 22, y), (x + 22, 106)], thick=3)
        canvas.line([(left + 16, 105), (left + 264, 105)], thick=10)
        canvas.text(left + 140, 183, f"NVLink: {inside:.0f} GB/s each", size=18)
    canvas.arrow([(150, 201), (150, 226), (490, 226), (490, 201)], _SENT, 3, both=True)
    canvas.text(320, 247, f"one network card each: {between:.3g} GB/s", size=18, fill=_SENT, bold=True)
    return Drawing(
        canvas,
        f"Sixteen GPUs in two nodes of eight. Inside a node each GPU has a link of {inside:.0f} GB/s to the others; "
        f"between the nodes, each has one network card of {between:.3g} GB/s.",
    )
