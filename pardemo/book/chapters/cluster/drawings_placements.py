"""Four ranks on two nodes: what the nodes send each other with tensor, data or pipeline parallelism between them."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS

_SENT = DONE["communication"]
_NODE, _SIDE, _RANK, _ROW = 210, 10, 46, 132
#: Title -> (label below each node's ranks), what a node sends to the other one in a step.
_WAYS = {
    "tensor inside, data across": (("activations", "activations"), "gradients: 8 MiB, once"),
    "tensor across, data inside": (("gradients", "gradients"), "activations: 32 MiB, in 16 all-reduces"),
    "tensor inside, pipeline across": (("layers 1 and 2", "layers 3 and 4"), "activations: 2 MiB, in 2 parts"),
}


def three_placements() -> Drawing:
    """Three placements of a step of four layers, with the bytes that a node's network card sends in each."""
    canvas = Canvas(640, 8 + len(_WAYS) * _ROW)
    for number, (title, texts) in enumerate(_WAYS.items()):
        _way(canvas, 24 + number * _ROW, title, *texts)
    values_text = "; ".join(f"{title}: {across}" for title, (_, across) in _WAYS.items())
    return Drawing(
        canvas, f"Four ranks on two nodes, three ways. A node sends to the other one in a step: {values_text}."
    )


def _way(canvas: Canvas, top: float, title: str, inside: tuple[str, str], across: str) -> None:
    canvas.text(_SIDE, top - 8, title, size=20, anchor="start", bold=True)
    middle, half = top + 48, _RANK / 2 + 3
    lefts = (_SIDE, 640 - _SIDE - _NODE)
    for left, words in zip(lefts, inside, strict=True):
        canvas.box(left, top + 10, _NODE, 92, thick=1.5)
        canvas.text(left + _NODE / 2, top + 90, words, size=18)
    places = [lefts[0] + 46, lefts[0] + _NODE - 46, lefts[1] + 46, lefts[1] + _NODE - 46]
    for rank, x in enumerate(places):
        canvas.box(x - _RANK / 2, middle - _RANK / 2, _RANK, _RANK, RANKS[rank], str(rank), size=20, bold=True)
    for a, b in ((0, 1), (2, 3)):
        canvas.arrow([(places[a] + half, middle), (places[b] - half, middle)], both=True)
    begin, end = lefts[0] + _NODE + 4, lefts[1] - 4
    for shift in (-9, 9):  # one for each rank of a node
        canvas.arrow([(begin, middle + shift), (end, middle + shift)], _SENT, both=True)
    kind, amount = across.split(": ")
    canvas.text(320, middle - 28, kind, size=18, fill=_SENT, bold=True)
    for number, words in enumerate(amount.split(", ")):
        canvas.text(320, middle + 28 + 22 * number, words, size=18, fill=_SENT, bold=True)
