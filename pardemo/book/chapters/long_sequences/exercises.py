"""The exercises of this chapter, and what checks an answer to each."""

import math
import random
from collections.abc import Iterator

from pardemo.book.chapters.long_sequences.drawings import merged_block, one_block
from pardemo.book.page.exercises import exercise, formula
from pardemo.context_parallel import positions
from pardemo.formulas import context_parallel as formulas


@formula(
    ((0, 2, 16), (1, 2, 16), (2, 4, 48), (3, 4, 48), (0, 1, 6), (5, 8, 64)),
    "Right: a piece from the front and its mirror image from the back.",
    asked="a list of positions",
)
def check_positions(rank: int, ranks: int, tokens: int):
    """The positions of a rank's tokens in zigzag, in the order on the rank."""
    right = positions(tokens, rank, ranks).tolist()
    each = tokens // (2 * ranks)
    first, second = right[:each], right[each:]
    one_too_far = [piece * each + index for piece in (rank, 2 * ranks - rank) for index in range(each)]
    return right, [
        (positions(tokens, rank, ranks, "plain").tolist(), "this is the plain order, one piece of N"),
        (one_too_far, "pieces are counted from 0, so the last of 2N is piece 2N − 1"),
        (second + first, "the earlier piece comes first: the mask of the rank's own block relies on it"),
        (first + second[::-1], "tokens inside the second piece keep their order"),
        (first, "this is one piece; a rank has two"),
    ]


Block = tuple[float, float, float]


def _pairs_of_blocks(draw: random.Random) -> Iterator[tuple[Block, Block]]:
    """The blocks differ in largest score, in number of keys and in values, so that no wrong answer is right."""
    for shift in (0.0, 1000.0):
        low = one_block(*zip(*((shift + draw.uniform(-1, 1), draw.uniform(-2, -1)) for _ in range(2)), strict=True))
        high = one_block(*zip(*((shift + draw.uniform(2, 4), draw.uniform(1, 2)) for _ in range(3)), strict=True))
        yield low, high
        yield high, low


@formula(
    _pairs_of_blocks,
    "Right, in either order, and for scores of 1,000, where exp alone would overflow.",
    asked="three numbers: largest, sum, output",
)
def check_merge(first: Block, second: Block):
    """Each block is its largest score, its sum relative to that, and its output."""
    largest, total, output, _ = merged_block(first, second)
    as_they_are = first[1] + second[1]
    by_them = (first[1] * first[2] + second[1] * second[2]) / as_they_are
    return (largest, total, output), [
        (lambda answer: not math.isclose(answer[0], largest), f"the largest score of both blocks is {largest:.4g}"),
        (
            lambda answer: math.isclose(answer[1], as_they_are, rel_tol=1e-6),
            "the two sums are relative to different largest scores, and have to be brought to one before they are "
            "added",
        ),
        (
            (largest, total, (first[2] + second[2]) / 2),
            "that is the plain mean; a block with larger scores weighs more",
        ),
        ((largest, total, by_them), "it is weighted by sums that are relative to different largest scores"),
        ((largest, total, output * total), "the output still has to be divided by the sum"),
    ]


#: ranks, batch, tokens, hidden, heads, heads of keys: the ranks divide the last, so nothing has to be repeated; no two
#: mistakes are off by one factor in the first case.
CASES = ((4, 1, 8192, 6144, 24, 8), (8, 2, 65_536, 5120, 40, 8), (2, 1, 4096, 2048, 16, 16))


@formula(
    [(way, *case) for case in CASES for way in ("ring", "Ulysses")],
    "Right: three laps of keys and values, or four parts of 1 − 1/N in each pass.",
    unit="bytes",
)
def check_bytes(way: str, ranks: int, batch: int, tokens: int, hidden: int, heads: int, kv_heads: int):
    """Checks what a rank sends in a layer, both passes."""
    share = kv_heads / heads
    width = hidden * kv_heads // heads
    if way == "ring":
        right = formulas.ring_bytes(batch, tokens, width, ranks)
        more = [
            (right / 3, "that is the forward pass alone"),
            (right * 2 / 3, "backward, keys and values go round once more, and their gradients behind them"),
            (right / 2, "both keys and values travel, in 2 bytes for each number"),
            (right / share, "only the heads of keys and values travel"),
            (right * ranks / (ranks - 1), "the last of N steps has nobody to send to"),
        ]
    else:
        right = formulas.ulysses_bytes(batch, tokens, hidden, width, ranks)
        more = [
            (right / 2, "that is the forward pass alone, or one byte for each number"),
            (right * 2 / (1 + share), "keys and values have fewer heads than queries and outputs"),
            (right * ranks / (ranks - 1), "a rank's own part, 1/N, stays where it is"),
        ]
    return right, [(2 * right, "numbers have 2 bytes"), (ranks * right, "a rank has s/N tokens"), *more]


@exercise("positions")
def my_positions(rank, ranks, tokens):
    """How many tokens has one of 2N pieces? A rank's two pieces have numbers that add up to 2N − 1."""
    each = tokens // (2 * ranks)  # tokens of a piece
    front, back = rank, 2 * ranks - 1 - rank
    return [piece * each + index for piece in (front, back) for index in range(each)]


@exercise("merge")
def my_merge(first, second):
    """Both sums have to be taken relative to the same largest score. What does a sum become when its largest score
    is replaced by a higher one?"""
    largest = max(first[0], second[0])
    # Each sum was taken relative to its own block's largest score: bring both to the common one.
    sums = [math.exp(block[0] - largest) * block[1] for block in (first, second)]
    total = sum(sums)
    out = (sums[0] * first[2] + sums[1] * second[2]) / total
    return largest, total, out


@exercise("bytes")
def my_bytes(way, ranks, batch, tokens, hidden, heads, kv_heads):
    """Begin with the bytes of one activation of a rank's own tokens. How many of them does it send, how often, and
    which part of each?"""
    mine = 2 * batch * tokens // ranks * hidden  # bytes of one activation of this rank's tokens
    if way == "ring":
        laps = 3  # keys and values forward, again backward, and their gradients
        return laps * (ranks - 1) * 2 * mine * kv_heads / heads
    passes = 2  # forward and backward
    return passes * (ranks - 1) / ranks * mine * (2 + 2 * kv_heads / heads)
