"""One sequence on several ranks: what crosses the cuts, and how two blocks of one softmax are merged."""

import math

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, INK, RANKS, WHOLE
from pardemo.draw.parts import legend

_TALK = DONE["communication"]
_LEFT, _WIDE, _GAP, _HIGH = 222, 90, 14, 40
#: A layer's parts, the loss at the end: name, note, what crosses each cut and in which direction (1: to later tokens).
ROWS = (
    ("norm, MLP", "token by token", "", 0),
    ("attention", "sees what is before", "keys, values", 1),
    ("loss", "wants the next token", "a label", -1),
)


def one_long_sequence() -> Drawing:
    """Four ranks with eight tokens: what works token by token, and what has to cross the cuts."""
    canvas = Canvas(640, 356)
    places = [_LEFT + rank * (_WIDE + _GAP) for rank in range(4)]
    for rank, x in enumerate(places):
        canvas.text(x + _WIDE / 2, 16, f"rank {rank}", size=18, bold=True)
        for token in range(2):
            canvas.box(x + token * _WIDE / 2, 36, _WIDE / 2, _HIGH, RANKS[rank], str(2 * rank + token))
    canvas.text(12, 36 + _HIGH / 2, "eight tokens", anchor="start", bold=True)
    y = 98.0
    for name, note, crossing, way in ROWS:
        canvas.text(12, y + 8, name, anchor="start", bold=True)
        canvas.text(12, y + 32, note, size=18, anchor="start")
        for rank, x in enumerate(places):
            canvas.box(x, y, _WIDE, _HIGH, RANKS[rank])
        if crossing:
            below = y + _HIGH + 14
            for x in places[1:]:
                ends = [(x - _GAP - 22, below), (x + 22, below)]
                canvas.arrow(ends if way > 0 else ends[::-1], _TALK)
            canvas.text(places[2] - _GAP / 2, below + 20, crossing, size=18, fill=_TALK, bold=True)
        y += 68 if not crossing else 92
    return Drawing(
        canvas,
        "Eight tokens on four ranks, two on each. Norms and MLP work token by token and need nothing from other ranks. "
        "Attention needs the keys and values of all earlier tokens, which lie on the ranks before. The loss of a "
        "rank's last token needs a label that lies on the next rank.",
    )


#: A query's scores with four keys and the keys' values (one number each), in two blocks.
SCORES, VALUES = ((2, 1), (3, 0)), ((10, 20), (30, 40))


def one_block(scores: tuple[float, ...], values: tuple[float, ...]) -> tuple[float, float, float]:
    """Largest score, sum of exp(score − largest), and the softmax's output of one block."""
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    total = sum(weights)
    return largest, total, sum(w * value for w, value in zip(weights, values, strict=True)) / total


def merged_block(
    first: tuple[float, float, float], second: tuple[float, float, float]
) -> tuple[float, float, float, tuple[float, float]]:
    """The same of both blocks together, and both sums at the new largest score."""
    largest = max(first[0], second[0])
    sums = tuple(math.exp(block[0] - largest) * block[1] for block in (first, second))
    out = (sums[0] * first[2] + sums[1] * second[2]) / sum(sums)
    return largest, sum(sums), out, (sums[0], sums[1])


def two_blocks() -> Drawing:
    """Two blocks of one query's softmax, each with its largest score, sum and output; and both merged."""
    canvas = Canvas(640, 408)
    blocks = [one_block(*block) for block in zip(SCORES, VALUES, strict=True)]
    rows = ("scores", "values", "largest", "sum", "output")
    for row, name in enumerate(rows):
        canvas.text(12, 56 + 36 * row, name, anchor="start", bold=row > 1)
    for rank, (x, (largest, total, out)) in enumerate(zip((130, 400), blocks, strict=True)):
        canvas.text(x + 100, 18, f"keys of rank {rank}", bold=True)
        texts = [_pair(SCORES[rank]), _pair(VALUES[rank]), f"{largest:g}", f"{total:.2f}", f"{out:.1f}"]
        for row, text in enumerate(texts):
            fill = RANKS[rank] if row < 2 else WHOLE
            canvas.box(x, 40 + 36 * row, 200, 32, fill, text)
        canvas.arrow([(x + 100, 222), (x + 100 + (40 if rank == 0 else -40), 256)], thick=2)
    largest, total, out, sums = merged_block(*blocks)
    firsts, seconds = (f"e^({block[0]:g}−{largest:g}) · {block[1]:.2f}" for block in blocks)
    lines = (
        f"largest {largest:g}",
        f"sum {firsts} + {seconds} = {sums[0]:.2f} + {sums[1]:.2f} = {total:.2f}",
        f"output ({sums[0]:.2f} · {blocks[0][2]:.1f} + {sums[1]:.2f} · {blocks[1][2]:.1f}) / {total:.2f} = {out:.1f}",
    )
    canvas.box(12, 262, 616, 100, WHOLE)
    for row, line in enumerate(lines):
        canvas.text(320, 280 + 32 * row, line, size=18, fill=INK, bold=row == 2)
    legend(canvas, 130, 388, {"of rank 0": RANKS[0], "of rank 1": RANKS[1]})
    return Drawing(
        canvas,
        f"One query and four keys in two blocks. Each block gives its largest score, its sum of exponentials and its "
        f"softmax's output: {blocks[0][2]:.1f} and {blocks[1][2]:.1f}. Merged, the first sum shrinks by e to the power "
        f"of {blocks[0][0]:g} minus {largest:g}, and the output is the mean of both, weighted by the sums: {out:.1f}.",
    )


def _pair(numbers: tuple[float, ...]) -> str:
    return " and ".join(f"{number:g}" for number in numbers)
