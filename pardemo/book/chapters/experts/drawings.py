"""Experts on two ranks: which token goes where, and what comes back."""

from collections.abc import Sequence

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS

#: Tokens of two ranks, and the expert that each chose; experts 0 and 1 lie on rank 0, the other two on rank 1.
CHOICES = ((("a", 2), ("b", 0), ("c", 1)), (("d", 3), ("e", 1), ("f", 0)))
EACH = 2


def sorted_by_expert() -> list[list[tuple[str, int]]]:
    """Each rank's tokens in the order in which it sends them."""
    return [sorted(tokens, key=lambda pair: pair[1]) for tokens in CHOICES]


def arrived() -> list[dict[int, list[str]]]:
    """By rank, each of its experts with the tokens that came for it: in the order of the ranks that sent them."""
    sent = [pair for tokens in sorted_by_expert() for pair in tokens]
    came = {expert: [token for token, chosen in sent if chosen == expert] for expert in range(2 * EACH)}
    return [{expert: came[expert] for expert in (rank * EACH, rank * EACH + 1)} for rank in range(2)]


@drawing(540)
def dispatch_and_combine(canvas: Canvas) -> None:
    """Two ranks with three tokens and two experts each. Each rank sorts its tokens by the expert that the router chose;
    an all-to-all brings them to their experts, 4 and 2 rows on ranks 0 and 1; a second all-to-all brings the experts'
    outputs back."""
    home = {token: rank for rank, tokens in enumerate(CHOICES) for token, _ in tokens}
    for rank, (x, experts) in enumerate(zip((16, 330), arrived(), strict=True)):
        middle = x + 147
        canvas.text(middle, 18, f"rank {rank}", size=22, bold=True)
        canvas.text(middle, 108, "sorted by expert")
        for y, choices in ((44, CHOICES[rank]), (124, sorted_by_expert()[rank]), (470, CHOICES[rank])):
            for number, (token, expert) in enumerate(choices):
                text = f"{token}′" if y == 470 else f"{token}→{expert}"
                canvas.box(x + 40 + number * 74, y, 66, 36, RANKS[rank], text, size=20)
        for index, (expert, tokens) in enumerate(experts.items()):
            left = x + index * 150
            canvas.box(left, 282, 142, 48, KEPT["parameters"], f"expert {expert}", size=20)
            for number, token in enumerate(tokens):
                canvas.box(left + 46 * number, 232, 42, 36, RANKS[home[token]], token, size=20)
                canvas.box(left + 46 * number, 344, 42, 36, RANKS[home[token]], f"{token}′", size=20)
        canvas.text(middle, 400, f"{sum(map(len, experts.values()))} rows")
    canvas.box(16, 176, 608, 34, DONE["communication"], "all-to-all: uneven parts", size=20)
    canvas.box(16, 420, 608, 34, DONE["communication"], "all-to-all: back", size=20)
    canvas.text(320, 526, "a→2: token a goes to expert 2. Colour: whose token it is.")


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
        goes = [(left + wide * e, y + 4, wide * weight, high - 8) for e, weight in enumerate(of_token) if weight]
        canvas.boxes(goes, KEPT["activations"])
    loads = [sum(1 for of_token in weights if of_token[e]) for e in range(count)]
    y = 40 + high * len(tokens) + 20
    canvas.text(30, y, "sum")
    canvas.texts([(left + wide * (e + 0.5), y, str(load)) for e, load in enumerate(loads)], size=18)
    return (
        f"{len(tokens)} tokens and {count} experts: which token goes to which experts, with what weight. Tokens by "
        f"expert: {', '.join(map(str, loads))}."
    )
