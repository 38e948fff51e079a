"""One sequence on several ranks: what crosses the cuts, the ring of keys, tokens for heads, labels at a cut."""

import math
from collections.abc import Sequence

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, INK, RANKS, VERDICTS, WHOLE
from pardemo.draw.parts import legend
from pardemo.draw.player import Player

_TALK = DONE["communication"]
_LEFT, _WIDE, _GAP, _HIGH = 222, 90, 14, 40
#: A layer's parts, the loss at the end: name, note, what crosses each cut and in which direction (1: to later tokens).
ROWS = (
    ("norm, MLP", "token by token", "", 0),
    ("attention", "sees what is before", "keys, values", 1),
    ("loss", "wants the next token", "a label", -1),
)


@drawing(356)
def one_long_sequence(canvas: Canvas) -> None:
    """Eight tokens on four ranks, two on each. Norms and MLP work token by token and need nothing from other ranks.
    Attention needs the keys and values of all earlier tokens, which lie on the ranks before. The loss of a rank's last
    token needs a label that lies on the next rank."""
    places = [_LEFT + rank * (_WIDE + _GAP) for rank in range(4)]
    for rank, x in enumerate(places):
        canvas.text(x + _WIDE / 2, 16, f"rank {rank}", bold=True)
        for token in range(2):
            canvas.box(x + token * _WIDE / 2, 36, _WIDE / 2, _HIGH, RANKS[rank], str(2 * rank + token), size=20)
    canvas.text(12, 36 + _HIGH / 2, "eight tokens", "start", bold=True, size=20)
    y = 98.0
    for name, note, crossing, way in ROWS:
        canvas.text(12, y + 8, name, "start", bold=True, size=20)
        canvas.text(12, y + 32, note, "start")
        for rank, x in enumerate(places):
            canvas.box(x, y, _WIDE, _HIGH, RANKS[rank])
        if crossing:
            below = y + _HIGH + 14
            for x in places[1:]:
                ends = [(x - _GAP - 22, below), (x + 22, below)]
                canvas.arrow(ends if way > 0 else ends[::-1], _TALK)
            canvas.text(places[2] - _GAP / 2, below + 20, crossing, fill=_TALK, bold=True)
        y += 68 if not crossing else 92


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


@drawing(408)
def two_blocks(canvas: Canvas) -> str:
    """Two blocks of one query's softmax, each with its largest score, sum and output; and both merged."""
    blocks = [one_block(*block) for block in zip(SCORES, VALUES, strict=True)]
    rows = ("scores", "values", "largest", "sum", "output")
    for row, name in enumerate(rows):
        canvas.text(12, 56 + 36 * row, name, "start", bold=row > 1, size=20)
    for rank, (x, (largest, total, out)) in enumerate(zip((130, 400), blocks, strict=True)):
        canvas.text(x + 100, 18, f"keys of rank {rank}", bold=True, size=20)
        texts = [_pair(SCORES[rank]), _pair(VALUES[rank]), f"{largest:g}", f"{total:.2f}", f"{out:.1f}"]
        for row, text in enumerate(texts):
            fill = RANKS[rank] if row < 2 else WHOLE
            canvas.box(x, 40 + 36 * row, 200, 32, fill, text, size=20)
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
        canvas.text(320, 280 + 32 * row, line, fill=INK, bold=row == 2)
    legend(canvas, 130, 388, {"of rank 0": RANKS[0], "of rank 1": RANKS[1]})
    return (
        f"One query and four keys in two blocks. Each block gives its largest score, its sum of exponentials and its "
        f"softmax's output: {blocks[0][2]:.1f} and {blocks[1][2]:.1f}. Merged, the first sum shrinks by e to the power "
        f"of {blocks[0][0]:g} minus {largest:g}, and the output is the mean of both, weighted by the sums: {out:.1f}."
    )


def _pair(numbers: tuple[float, ...]) -> str:
    return " and ".join(f"{number:g}" for number in numbers)


_SIDE, _BEFORE, _AFTER = 152, 110, 430


@drawing(448)
def tokens_for_heads(canvas: Canvas) -> None:
    """Two ranks. Between the layers each has half of the tokens with all heads. Each sends the other one those of its
    tokens' heads that the other one works on, a quarter of the whole. In attention each rank then has all tokens with
    half of the heads."""
    for x, words in ((_BEFORE, "between the layers"), (_AFTER, "in attention")):
        canvas.text(x + _SIDE / 2, 16, words, bold=True)
    half = _SIDE / 2
    for rank in range(2):
        y = 44 + rank * (_SIDE + 36)
        canvas.text(12, y + half, f"rank {rank}", "start", bold=True, size=20)
        for x in (_BEFORE, _AFTER):
            canvas.box(x, y, _SIDE, _SIDE, thick=1, dashed=True)
        for part in range(2):  # of the heads, before; of the tokens, after
            _quarter(canvas, _BEFORE + part * half, y + rank * half, RANKS[rank], part != rank)
            _quarter(canvas, _AFTER + rank * half, y + part * half, RANKS[part], part != rank)
    left, right = _BEFORE + _SIDE + 8, _AFTER - 8
    top, bottom = 44 + half / 2, 44 + _SIDE + 36 + half / 2
    canvas.arrow([(left, top), (right, bottom)], _TALK)
    canvas.arrow([(left, bottom + half), (right, top + half)], _TALK)
    canvas.text((left + right) / 2, 26, "all-to-all", fill=_TALK, bold=True)
    canvas.text(12, 404, "down: tokens; across: heads; thick: what travels", "start")
    legend(canvas, 12, 434, {f"tokens of rank {rank}": RANKS[rank] for rank in range(2)})


def _quarter(canvas: Canvas, x: float, y: float, fill: str, travels: bool) -> None:
    cell = _SIDE / 4
    canvas.boxes([(x + i * cell, y + k * cell, cell, cell) for i in range(2) for k in range(2)], fill, thick=0.8)
    if travels:
        canvas.box(x + 2, y + 2, 2 * cell - 4, 2 * cell - 4, thick=4, border=_TALK)


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


@drawing(232)
def labels_at_a_cut(canvas: Canvas) -> None:
    """Tokens 1 to 8 in zigzag on two ranks: 1, 2, 7, 8 and 3, 4, 5, 6. A rank that makes labels from its own tokens
    gives token 2 the label 7 in place of 3, and token 6 none in place of 7."""
    cell, high = 52, 40
    rows = (("tokens", 44), ("labels: shift, then cut", 104), ("labels: cut, then shift", 164))
    for name, y in rows:
        for line, words in enumerate(name.split(": ")):
            canvas.text(12, y + (10 if ":" in name else 20) + 23 * line, words, "start", bold=line == 0)
    for rank, (x, tokens) in enumerate(zip((184, 412), TOKENS, strict=True)):
        canvas.text(x + 2 * cell, 18, f"rank {rank}", bold=True, size=20)
        right, alone = labels_of(tokens), shifted_alone(tokens)
        for place, token in enumerate(tokens):
            at = x + place * cell
            canvas.box(at, 44, cell, high, RANKS[rank], str(token), size=20)
            canvas.box(at, 104, cell, high, WHOLE, right[place], size=20)
            wrong = alone[place] != right[place]
            canvas.box(at, 164, cell, high, VERDICTS["fails"] if wrong else WHOLE, alone[place], bold=wrong, size=20)
    canvas.text(184, 220, "dark: wrong, or missing", "start")


Pieces = tuple[int, int]


def in_order(rank: int, ranks: int) -> Pieces:
    """The two pieces of a rank, of 2N, where the sequence is cut in its order."""
    return 2 * rank, 2 * rank + 1


def in_zigzag(rank: int, ranks: int) -> Pieces:
    """The two pieces of a rank in the zigzag: one from the front and one from the back."""
    return rank, 2 * ranks - 1 - rank


ORDERS = {"plain order": in_order, "zigzag": in_zigzag}


def blocks_of_step(order: str, rank: int, ranks: int, step: int) -> list[tuple[int, int]]:
    """(piece of queries, piece of keys) that a rank computes in a step: those of the rank ``step`` before it."""
    pieces = ORDERS[order]
    source = (rank - step) % ranks
    return [(a, b) for a in pieces(rank, ranks) for b in pieces(source, ranks) if b <= a]


def ring_of_keys(ranks: int = 4) -> Player:
    """Squares of queries (down) and keys (across), in both orders: a step fills the blocks that it computes."""
    return Player(
        [_frame(ranks, step) for step in range(ranks)],
        f"ring attention on {ranks} ranks, step by step, in plain order and in zigzag",
        start=min(1, ranks - 1),
        first=0,
    )


def _frame(ranks: int, step: int) -> tuple[Canvas, str]:
    canvas = Canvas(640, 432)
    side = 256
    most, sayings = [], []
    for x, order in zip((48, 370), ORDERS, strict=True):
        canvas.text(x + side / 2, 16, order, bold=True, size=20)
        counts = _square(canvas, x, 36, side, order, ranks, step)
        line = "  ".join(str(count) for count in counts)
        canvas.text(x + side / 2, 36 + side + 26, f"blocks by rank: {line}")
        idle = [str(rank) for rank, count in enumerate(counts) if not count]
        if idle:
            width = side
            label = f"idle: {'rank' if len(idle) == 1 else 'ranks'} {', '.join(idle)}"
            canvas.box(x, 36 + side + 46, width, 32, DONE["idle"], label)
        most.append(max(counts))
        sayings.append(f"in {order} the ranks compute {', '.join(map(str, counts))} blocks")
    canvas.lines(
        12, 396, ("down: queries, with the rank that has them; across: keys", "thick: blocks of this step"), "start"
    )
    where = "its own keys" if step == 0 else f"the keys of the rank that is {step} before it"
    caption = (
        f"Step {step}: each rank has {where}; {', '.join(sayings)}. The step lasts as long as its busiest rank: "
        f"{most[0]} blocks, and {most[1]}."
    )
    return canvas, caption


def _square(canvas: Canvas, x: float, y: float, side: float, order: str, ranks: int, step: int) -> list[int]:
    cell = side / (2 * ranks)
    canvas.box(x, y, side, side, thick=1, dashed=True)
    pieces = ORDERS[order]
    owner = {piece: rank for rank in range(ranks) for piece in pieces(rank, ranks)}
    canvas.texts([(x - 16, y + (piece + 0.5) * cell, str(owner[piece])) for piece in range(2 * ranks)])
    counts = []
    now: list[tuple[int, int]] = []
    for rank in range(ranks):
        done = [block for earlier in range(step) for block in blocks_of_step(order, rank, ranks, earlier)]
        here = blocks_of_step(order, rank, ranks, step)
        canvas.boxes([_place(x, y, cell, block) for block in done + here], RANKS[rank], thick=0.8)
        counts.append(len(here))
        now += here
    for block in now:
        left, top, *_ = _place(x, y, cell, block)
        canvas.box(left + 3, top + 3, cell - 6, cell - 6, thick=3, border=INK)
    return counts


def _place(x: float, y: float, cell: float, block: tuple[int, int]) -> tuple[float, float, float, float]:
    queries, keys = block
    return x + keys * cell, y + queries * cell, cell, cell
