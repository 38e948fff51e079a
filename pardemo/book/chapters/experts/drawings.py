"""Experts on two ranks: which token goes where, and what comes back."""

from collections.abc import Sequence

from pardemo.draw import palette
from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, RANKS

#: Tokens of two ranks, and the expert that each chose; experts 0 and 1 lie on rank 0, the other two on rank 1.
CHOICES = ((("a", 2), ("b", 0), ("c", 1)), (("d", 3), ("e", 1), ("f", 0)))
EACH = 2
_TALK, _PARAMETERS = DONE["communication"], palette.KEPT["parameters"]
_LEFT, _WIDE = (16, 330), 294


def sorted_by_expert() -> list[list[tuple[str, int]]]:
    """Each rank's tokens in the order in which it sends them."""
    return [sorted(tokens, key=lambda pair: pair[1]) for tokens in CHOICES]


def arrived() -> list[dict[int, list[str]]]:
    """By rank, each of its experts with the tokens that came for it: in the order of the ranks that sent them."""
    return [
        {
            expert: [token for tokens in sorted_by_expert() for token, chosen in tokens if chosen == expert]
            for expert in range(rank * EACH, (rank + 1) * EACH)
        }
        for rank in range(len(CHOICES))
    ]


@drawing(540)
def dispatch_and_combine(canvas: Canvas) -> str:
    """Tokens of two ranks on their way to their experts and back, from top to bottom."""
    for rank, x in enumerate(_LEFT):
        canvas.text(x + _WIDE / 2, 18, f"rank {rank}", size=22, bold=True)
        _tokens(canvas, x, 44, [(f"{token}→{expert}", rank) for token, expert in CHOICES[rank]])
        _tokens(canvas, x, 124, [(f"{token}→{expert}", rank) for token, expert in sorted_by_expert()[rank]])
        canvas.text(x + _WIDE / 2, 108, "sorted by expert")
    _bar(canvas, 176, "all-to-all: uneven parts")
    home = {token: rank for rank, tokens in enumerate(CHOICES) for token, _ in tokens}
    for x, experts in zip(_LEFT, arrived(), strict=True):
        for place, (expert, tokens) in enumerate(experts.items()):
            left = x + place * 150
            for number, token in enumerate(tokens):
                canvas.box(left + 46 * number, 232, 42, 36, RANKS[home[token]], token, size=20)
            canvas.box(left, 282, 142, 48, _PARAMETERS, f"expert {expert}", size=20)
            for number, token in enumerate(tokens):
                canvas.box(left + 46 * number, 344, 42, 36, RANKS[home[token]], f"{token}′", size=20)
        count = sum(map(len, experts.values()))
        canvas.text(x + _WIDE / 2, 400, f"{count} rows")
    _bar(canvas, 420, "all-to-all: back")
    for rank, x in enumerate(_LEFT):
        _tokens(canvas, x, 470, [(f"{token}′", rank) for token, _ in CHOICES[rank]])
    canvas.text(320, 526, "a→2: token a goes to expert 2. Colour: whose token it is.")
    counts = " and ".join(str(sum(map(len, experts.values()))) for experts in arrived())
    return (
        "Two ranks with three tokens and two experts each. Each rank sorts its tokens by the expert that the router "
        f"chose; an all-to-all brings them to their experts, {counts} rows on ranks 0 and 1; a second all-to-all "
        "brings the experts' outputs back."
    )


def _tokens(canvas: Canvas, x: float, y: float, boxes: Sequence[tuple[str, int]]) -> None:
    for number, (text, rank) in enumerate(boxes):
        canvas.box(x + 40 + number * 74, y, 66, 36, RANKS[rank], text, size=20)


def _bar(canvas: Canvas, y: float, text: str) -> None:
    canvas.box(_LEFT[0], y, _LEFT[1] + _WIDE - _LEFT[0], 34, _TALK, text, size=20)


@drawing()
def who_goes_where(canvas: Canvas, tokens: Sequence[str], weights: Sequence[Sequence[float]]) -> str:
    """A row for each token, a column for each expert: a box where the token goes there, as wide as its weight is large.

    Args:
        tokens: characters. weights: [tokens, experts], 0 where the token does not go.
    """
    count, high = len(weights[0]), 27
    left, wide = 60, 570 / count
    canvas.height = 50 + high * len(tokens) + 44
    canvas.text(30, 20, "token")
    canvas.texts([(left + wide * (e + 0.5), 20, str(e)) for e in range(count)], size=18)
    for row, (token, of_token) in enumerate(zip(tokens, weights, strict=True)):
        y = 40 + row * high
        canvas.text(30, y + high / 2, {"\n": "⏎", " ": "␣"}.get(token, token), size=20)
        canvas.boxes([(left + wide * e, y, wide, high) for e in range(count)], "none", thick=0.5)
        canvas.boxes(
            [(left + wide * e, y + 4, wide * weight, high - 8) for e, weight in enumerate(of_token) if weight],
            palette.KEPT["activations"],
        )
    loads = [sum(1 for of_token in weights if of_token[e]) for e in range(count)]
    y = 40 + high * len(tokens) + 20
    canvas.text(30, y, "sum")
    canvas.texts([(left + wide * (e + 0.5), y, str(load)) for e, load in enumerate(loads)], size=18)
    return (
        f"{len(tokens)} tokens and {count} experts: which token goes to which experts, with what weight. Tokens by "
        f"expert: {', '.join(map(str, loads))}."
    )
