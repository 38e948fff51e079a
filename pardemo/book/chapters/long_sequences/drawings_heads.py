"""Ulysses: an all-to-all turns some tokens with all heads into all tokens with some heads."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS
from pardemo.draw.parts import legend

_TALK = DONE["communication"]
_SIDE, _BEFORE, _AFTER = 152, 110, 430


def tokens_for_heads() -> Drawing:
    """Four tokens (down) with four heads (across) on two ranks, before and after; colour: whose tokens they are."""
    canvas = Canvas(640, 448)
    for x, words in ((_BEFORE, "between the layers"), (_AFTER, "in attention")):
        canvas.text(x + _SIDE / 2, 16, words, bold=True, size=18)
    half = _SIDE / 2
    for rank in range(2):
        y = 44 + rank * (_SIDE + 36)
        canvas.text(12, y + half, f"rank {rank}", anchor="start", bold=True)
        for x in (_BEFORE, _AFTER):
            canvas.box(x, y, _SIDE, _SIDE, thick=1, dashed=True)
        for part in range(2):  # of the heads, before; of the tokens, after
            _quarter(canvas, _BEFORE + part * half, y + rank * half, RANKS[rank], part != rank)
            _quarter(canvas, _AFTER + rank * half, y + part * half, RANKS[part], part != rank)
    left, right = _BEFORE + _SIDE + 8, _AFTER - 8
    top, bottom = 44 + half / 2, 44 + _SIDE + 36 + half / 2
    canvas.arrow([(left, top), (right, bottom)], _TALK)
    canvas.arrow([(left, bottom + half), (right, top + half)], _TALK)
    canvas.text((left + right) / 2, 26, "all-to-all", size=18, fill=_TALK, bold=True)
    canvas.text(12, 404, "down: tokens; across: heads; thick: what travels", size=18, anchor="start")
    legend(canvas, 12, 434, {f"tokens of rank {rank}": RANKS[rank] for rank in range(2)})
    return Drawing(
        canvas,
        "Two ranks. Between the layers each has half of the tokens with all heads. Each sends the other one those of "
        "its tokens' heads that the other one works on, a quarter of the whole. In attention each rank then has all "
        "tokens with half of the heads.",
    )


def _quarter(canvas: Canvas, x: float, y: float, fill: str, travels: bool) -> None:
    cell = _SIDE / 4
    canvas.boxes([(x + i * cell, y + k * cell, cell, cell) for i in range(2) for k in range(2)], fill, thick=0.8)
    if travels:
        canvas.box(x + 2, y + 2, 2 * cell - 4, 2 * cell - 4, thick=4, border=_TALK)
