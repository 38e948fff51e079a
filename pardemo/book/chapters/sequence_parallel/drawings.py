"""Sequence parallelism: where an activation is whole, and where it is cut by tokens or by columns."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS

#: A block from its input on: a tensor (its cut, what is computed, a note) or a collective.
BLOCK = (
    ("tokens", "x, norm", "cut by tokens"),
    "all-gather",
    ("whole", "into query, key, value", "all tokens on both"),
    ("columns", "attention, output", "its own heads only"),
    "reduce-scatter",
    ("tokens", "dropout, add, norm", "cut by tokens"),
    "all-gather",
    ("whole", "into the MLP", "all tokens on both"),
    ("columns", "GeLU, second matrix", "its own columns only"),
    "reduce-scatter",
    ("tokens", "dropout, add", "cut by tokens"),
)
_TALK = DONE["communication"]
_LEFT, _WIDE, _HIGH = (300, 478), 146, 56
_TOKENS = 4


def sequence_parallel() -> Drawing:
    """A block on two ranks from top to bottom, with the part of each activation that a rank has."""
    canvas = Canvas(640, 788)
    for rank, x in enumerate(_LEFT):
        canvas.text(x + _WIDE / 2, 20, f"rank {rank}", size=22, bold=True)
    y = 44.0
    for step in BLOCK:
        if isinstance(step, str):
            canvas.box(_LEFT[0], y, _LEFT[1] + _WIDE - _LEFT[0], 32, _TALK, step)
            y += 42
            continue
        cut, name, note = step
        canvas.text(20, y + 17, name, anchor="start", bold=True)
        canvas.text(20, y + 43, note, size=18, anchor="start")
        for rank, x in enumerate(_LEFT):
            _tensor(canvas, x, y, cut, rank)
        y += _HIGH + 10
    canvas.text(20, y + 16, "down: tokens; across: features; colour: the rank it comes from", size=18, anchor="start")
    backward = (
        "Backward goes from the bottom up: an all-gather becomes",
        "a reduce-scatter, and the reverse.",
    )
    canvas.lines(20, y + 50, backward, anchor="start")
    return Drawing(
        canvas,
        "A transformer block on two ranks under sequence parallelism. Norms, dropouts and additions work on half "
        "the tokens; "
        "an all-gather puts all tokens together before attention and MLP, which are cut by heads and columns, and a "
        "reduce-scatter sums their results and cuts by tokens again.",
    )


def _tensor(canvas: Canvas, x: float, y: float, cut: str, rank: int) -> None:
    """This rank's part of a tensor [tokens, hidden], coloured; the rest is empty."""
    row = _HIGH / _TOKENS
    if cut == "columns":
        half = _WIDE / 2
        canvas.boxes([(x + rank * half, y + k * row, half, row) for k in range(_TOKENS)], RANKS[rank])
    for token in range(_TOKENS) if cut != "columns" else ():
        owner = token * 2 // _TOKENS
        if cut == "whole" or owner == rank:
            canvas.boxes([(x, y + token * row, _WIDE, row)], RANKS[owner])
    if cut != "whole":
        canvas.box(x, y, _WIDE, _HIGH, thick=1, dashed=True)
