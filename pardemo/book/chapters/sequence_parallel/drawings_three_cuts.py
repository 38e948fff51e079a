"""Three techniques that are called sequence parallelism: how each cuts tokens and heads."""

from collections.abc import Callable

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS
from pardemo.draw.parts import legend

#: Name, what is sent before attention, how attention is cut, whether a rank's weights are whole or cut.
WAYS = (
    (("Megatron's", "(this chapter)"), "all-gather", "heads", "cut"),
    (("context", "parallelism"), "ring", "tokens", "whole"),
    (("Ulysses", "(DeepSpeed)"), "all-to-all", "heads", "whole"),
)
_SIDE, _FIRST, _SECOND = 84, 160, 408


def sequence_cuts() -> Drawing:
    """Squares of tokens (down) and heads (across), coloured by the rank that has them."""
    canvas = Canvas(640, 396)
    for x, words in ((_FIRST, "between layers"), (_SECOND, "in attention")):
        canvas.text(x + _SIDE / 2, 18, words, bold=True, size=18)
    canvas.text(580, 18, "weights", bold=True, size=18)
    for number, (name, talk, cut, weights) in enumerate(WAYS):
        y = 44 + 104 * number
        canvas.lines(12, y + 30, name, anchor="start")
        _square(canvas, _FIRST, y, "tokens")
        canvas.text((_FIRST + _SIDE + _SECOND) / 2, y + 24, talk, size=18, fill=DONE["communication"], bold=True)
        canvas.arrow([(_FIRST + _SIDE + 12, y + 46), (_SECOND - 12, y + 46)], DONE["communication"])
        _square(canvas, _SECOND, y, cut)
        canvas.text(580, y + 42, weights, size=18)
    canvas.text(12, 374, "down: tokens; across: heads", size=18, anchor="start")
    legend(canvas, 400, 374, {f"rank {rank}": RANKS[rank] for rank in range(2)})
    return Drawing(
        canvas,
        "Between the layers all three cut the tokens. Megatron's sequence parallelism gathers all tokens before "
        "attention, which is cut by heads; context parallelism leaves queries cut by tokens, and keys "
        "and values go round a ring; Ulysses swaps tokens for heads by an all-to-all. The last two have whole weights.",
    )


def _square(canvas: Canvas, x: float, y: float, cut: str) -> None:
    half, cell = _SIDE / 2, _SIDE / 4
    place: Callable[[int, int, int], tuple[float, float]] = (
        (lambda rank, i, k: (x + i * cell, y + rank * half + k * cell))
        if cut == "tokens"
        else (lambda rank, i, k: (x + rank * half + k * cell, y + i * cell))
    )
    for rank in range(2):
        cells = [(*place(rank, i, k), cell, cell) for i in range(4) for k in range(2)]
        canvas.boxes(cells, RANKS[rank], thick=0.8)
