"""Labels of a sequence that is cut: shifted before the cut, and after it."""

from collections.abc import Sequence

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import RANKS, VERDICTS, WHOLE

#: Eight tokens in the zigzag on two ranks.
TOKENS = ((1, 2, 7, 8), (3, 4, 5, 6))
NONE = "–"


def labels_of(tokens: Sequence[int]) -> list[str]:
    """The right labels: the token that follows in the whole sequence; the last one has none."""
    last = max(max(mine) for mine in TOKENS)
    return [str(token + 1) if token < last else NONE for token in tokens]


def shifted_alone(tokens: Sequence[int]) -> list[str]:
    """What a rank makes of its own tokens alone: each one's neighbour, whatever it is."""
    return [*map(str, tokens[1:]), NONE]


def labels_at_a_cut() -> Drawing:
    """Tokens 1 to 8 on two ranks in zigzag, with the right labels and with those that a rank makes by itself."""
    canvas = Canvas(640, 232)
    cell, high = 52, 40
    rows = (("tokens", 44), ("labels: shift, then cut", 104), ("labels: cut, then shift", 164))
    for name, y in rows:
        for line, words in enumerate(name.split(": ")):
            canvas.text(12, y + (10 if ":" in name else 20) + 23 * line, words, size=18, anchor="start", bold=line == 0)
    for rank, (x, tokens) in enumerate(zip((184, 412), TOKENS, strict=True)):
        canvas.text(x + 2 * cell, 18, f"rank {rank}", bold=True)
        right, alone = labels_of(tokens), shifted_alone(tokens)
        for place, token in enumerate(tokens):
            at = x + place * cell
            canvas.box(at, 44, cell, high, RANKS[rank], str(token))
            canvas.box(at, 104, cell, high, WHOLE, right[place])
            wrong = alone[place] != right[place]
            canvas.box(at, 164, cell, high, VERDICTS["fails"] if wrong else WHOLE, alone[place], bold=wrong)
    canvas.text(184, 220, "dark: wrong, or missing", size=18, anchor="start")
    return Drawing(
        canvas,
        "Tokens 1 to 8 in zigzag on two ranks: 1, 2, 7, 8 and 3, 4, 5, 6. A rank that makes labels from its own tokens "
        "gives token 2 the label 7 in place of 3, and token 6 none in place of 7.",
    )
