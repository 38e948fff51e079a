"""One sequence on several ranks: what crosses the cuts, the ring of keys, tokens for heads, labels at a cut."""

import math
from collections.abc import Sequence

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, INK, RANKS, VERDICTS, WHOLE
from pardemo.draw.parts import legend
from pardemo.draw.player import Player

_TALK = DONE["communication"]


@drawing(356)
def one_long_sequence(canvas: Canvas) -> None:
    """Eight tokens on four ranks, two on each. Norms and MLP work token by token and need nothing from other ranks.
    Attention needs the keys and values of all earlier tokens, which lie on the ranks before. The loss of a rank's last
    token needs a label that lies on the next rank."""
    rows = {98: ("norm, MLP", "token by token"), 166: ("attention", "sees what is before"),
            258: ("loss", "wants the next token")}  # fmt: skip
    wide, high, places = 90, 40, [222 + 104 * rank for rank in range(4)]
    for rank, x in enumerate(places):
        canvas.text(x + wide / 2, 16, f"rank {rank}", bold=True)
        for token in range(2):
            canvas.box(x + token * wide / 2, 36, wide / 2, high, RANKS[rank], str(2 * rank + token), size=20)
    canvas.text(12, 56, "eight tokens", "start", bold=True, size=20)
    for y, (name, note) in rows.items():
        canvas.text(12, y + 8, name, "start", bold=True, size=20)
        canvas.text(12, y + 32, note, "start")
        for rank, x in enumerate(places):
            canvas.box(x, y, wide, high, RANKS[rank])
    for below, crossing in ((220, "keys, values"), (312, "a label")):
        for x in places[1:]:
            ends = [(x - 36, below), (x + 22, below)]
            canvas.arrow(ends if crossing == "keys, values" else ends[::-1], _TALK)
        canvas.text(places[2] - 7, below + 20, crossing, fill=_TALK, bold=True)


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
        pairs = [f"{first:g} and {second:g}" for first, second in (SCORES[rank], VALUES[rank])]
        texts = [*pairs, f"{largest:g}", f"{total:.2f}", f"{out:.1f}"]
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


@drawing(448)
def tokens_for_heads(canvas: Canvas) -> None:
    """Two ranks. Between the layers each has half of the tokens with all heads. Each sends the other one those of its
    tokens' heads that the other one works on, a quarter of the whole. In attention each rank then has all tokens with
    half of the heads."""
    half, cell, before, after = 76, 38, 110, 430
    for x, words in ((before, "between the layers"), (after, "in attention")):
        canvas.text(x + half, 16, words, bold=True)
    for rank in range(2):
        y = 44 + 188 * rank
        canvas.text(12, y + half, f"rank {rank}", "start", bold=True, size=20)
        for x in (before, after):
            canvas.box(x, y, 2 * half, 2 * half, thick=1, dashed=True)
        for part in range(2):  # of the heads, before; of the tokens, after
            quarters = (before + part * half, y + rank * half, rank), (after + rank * half, y + part * half, part)
            for left, top, owner in quarters:
                cells = [(left + i * cell, top + k * cell, cell, cell) for i in range(2) for k in range(2)]
                canvas.boxes(cells, RANKS[owner], thick=0.8)
                if part != rank:  # it travels
                    canvas.box(left + 2, top + 2, half - 4, half - 4, thick=4, border=_TALK)
    canvas.arrow([(270, 82), (422, 270)], _TALK)
    canvas.arrow([(270, 346), (422, 158)], _TALK)
    canvas.text(346, 26, "all-to-all", fill=_TALK, bold=True)
    canvas.text(12, 404, "down: tokens; across: heads; thick: what travels", "start")
    legend(canvas, 12, 434, {f"tokens of rank {rank}": RANKS[rank] for rank in range(2)})


#: Eight tokens in the zigzag on two ranks.
TOKENS = ((1, 2, 7, 8), (3, 4, 5, 6))
NONE = "–"


def labels_of(tokens: Sequence[int]) -> list[str]:
    """The right labels: the token that follows in the whole sequence; the last one has none."""
    last = max(max(mine) for mine in TOKENS)
    return [str(token + 1) if token < last else NONE for token in tokens]


def shifted_alone(tokens: Sequence[int]) -> list[str]:
    """Returns the targets that a rank makes of its own tokens alone: each one's neighbour, whatever it is."""
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
        for index, token in enumerate(tokens):
            at = x + index * cell
            canvas.box(at, 44, cell, high, RANKS[rank], str(token), size=20)
            canvas.box(at, 104, cell, high, WHOLE, right[index], size=20)
            wrong = alone[index] != right[index]
            canvas.box(at, 164, cell, high, VERDICTS["fails"] if wrong else WHOLE, alone[index], bold=wrong, size=20)
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
    frames = [_ring_frame(ranks, step) for step in range(ranks)]
    name = f"ring attention on {ranks} ranks, step by step, in plain order and in zigzag"
    return Player(frames, name, start=min(1, ranks - 1), first=0)


def _ring_frame(ranks: int, step: int) -> tuple[Canvas, str]:
    canvas, side = Canvas(640, 432), 256
    cell = side / (2 * ranks)
    most, sayings = [], []
    for x, (order, pieces) in zip((48, 370), ORDERS.items(), strict=True):
        canvas.text(x + side / 2, 16, order, bold=True, size=20)
        canvas.box(x, 36, side, side, thick=1, dashed=True)
        owners = {piece: rank for rank in range(ranks) for piece in pieces(rank, ranks)}
        canvas.texts([(x - 16, 36 + (piece + 0.5) * cell, str(owners[piece])) for piece in range(2 * ranks)])
        steps = [[blocks_of_step(order, rank, ranks, at) for at in range(step + 1)] for rank in range(ranks)]
        for rank, blocks in enumerate(steps):
            places = [(x + keys * cell, 36 + queries * cell, cell, cell) for at in blocks for queries, keys in at]
            canvas.boxes(places, RANKS[rank], thick=0.8)
        for queries, keys in (block for blocks in steps for block in blocks[-1]):
            canvas.box(x + keys * cell + 3, 39 + queries * cell, cell - 6, cell - 6, thick=3, border=INK)
        counts = [len(blocks[-1]) for blocks in steps]
        canvas.text(x + side / 2, 318, f"blocks by rank: {'  '.join(map(str, counts))}")
        if idle := [str(rank) for rank, count in enumerate(counts) if not count]:
            canvas.box(x, 338, side, 32, DONE["idle"], f"idle: rank{'s' * (len(idle) > 1)} {', '.join(idle)}")
        most.append(max(counts))
        sayings.append(f"in {order} the ranks compute {', '.join(map(str, counts))} blocks")
    key = "down: queries, with the rank that has them; across: keys", "thick: blocks of this step"
    canvas.lines(12, 396, key, "start")
    where = "its own keys" if step == 0 else f"the keys of the rank that is {step} before it"
    return canvas, (
        f"Step {step}: each rank has {where}; {', '.join(sayings)}. The step lasts as long as its busiest rank: "
        f"{most[0]} blocks, and {most[1]}."
    )
