"""A transformer block cut by heads and features: what each rank computes alone, what both compute, where they sum."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS, WHOLE

#: From the input on: a part (whether it is cut, its name, a note on dropout), or one of the operators f and g.
BLOCK = (
    (False, "norm", ""),
    "f",
    (True, "attention, by heads", "its own random numbers"),
    "g",
    (False, "bias, dropout, add, norm", "the same random numbers"),
    "f",
    (True, "MLP, by features", ""),
    "g",
    (False, "bias, dropout, add", "the same random numbers"),
)
_TALK = DONE["communication"]
_LEFT, _WIDE, _HIGH = (300, 478), 146, 52
_OPERATOR_LABELS = {"f": "f: backward an all-reduce", "g": "g: forward an all-reduce"}


def block_cut() -> Drawing:
    """A block on two ranks from top to bottom: white parts are whole on both, coloured ones a rank's own half."""
    canvas = Canvas(640, 614)
    for rank, x in enumerate(_LEFT):
        canvas.text(x + _WIDE / 2, 20, f"rank {rank}", size=22, bold=True)
    y = 44.0
    for step in BLOCK:
        if isinstance(step, str):
            canvas.box(
                _LEFT[0], y, _LEFT[1] + _WIDE - _LEFT[0], 34, "none", _OPERATOR_LABELS[step], border=_TALK, thick=3
            )
            y += 44
            continue
        cut, name, note = step
        canvas.text(16, y + (16 if note else _HIGH / 2), name, size=19, anchor="start", bold=True)
        if note:
            canvas.text(16, y + 40, note, size=18, anchor="start")
        for rank, x in enumerate(_LEFT):
            _part(canvas, x, y, cut, rank)
        y += _HIGH + 10
    canvas.lines(
        16,
        y + 18,
        (
            "White: all tokens, all features, on both ranks.",
            "Coloured: all tokens, and this rank's heads or features.",
            "Dashed: what the other rank has.",
        ),
        anchor="start",
    )
    return Drawing(
        canvas,
        "A transformer block on two ranks. Norms, biases after g, dropout and the additions are whole on both; "
        "attention is cut by heads and the MLP by features, each between f, which all-reduces backward, and g, which "
        "all-reduces forward. Dropout outside the cut parts takes the same random numbers on both ranks, inside them a "
        "rank's own.",
    )


def _part(canvas: Canvas, x: float, y: float, cut: bool, rank: int) -> None:
    if not cut:
        canvas.box(x, y, _WIDE, _HIGH, WHOLE)
        return
    half = _WIDE / 2
    canvas.box(x, y, _WIDE, _HIGH, thick=1, dashed=True)
    canvas.box(x + rank * half, y, half, _HIGH, RANKS[rank], str(rank))
