"""The exercises of this chapter, and what checks an answer to each."""

import math
import random
from collections.abc import Callable

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed
from pardemo.context_parallel import positions
from pardemo.formulas import context_parallel as formulas

EXERCISES = {
    "positions": Exercise(
        "my_positions",
        "How many tokens has one of 2N pieces? A rank's two pieces have numbers that add up to 2N − 1.",
    ),
    "merge": Exercise(
        "my_merge",
        "Both sums have to be taken relative to the same largest score. What does a sum become when its largest score "
        "is replaced by a higher one?",
    ),
    "bytes": Exercise(
        "my_bytes",
        "Begin with the bytes of one activation of a rank's own tokens. How many of them does it send, how often, and "
        "which part of each?",
    ),
}


def check_positions(function: Callable[[int, int, int], list[int]]) -> str:
    """``function(rank, ranks, tokens)`` is the positions of a rank's tokens in zigzag, in the order on the rank."""
    for rank, ranks, tokens in ((0, 2, 16), (1, 2, 16), (2, 4, 48), (3, 4, 48), (0, 1, 6), (5, 8, 64)):
        answer = call(function, rank, ranks, tokens)
        where = f"For rank {rank} of {ranks} and {tokens} tokens"
        try:
            numbers = [int(number) for number in answer]  # type: ignore[call-overload]
        except TypeError:
            raise Mistake(f"{where} it returned {type(answer).__name__}, not a list of positions.") from None
        expected = positions(tokens, rank, ranks).tolist()
        if numbers == expected:
            continue
        each = tokens // (2 * ranks)
        back = [piece * each + place for piece in (rank, 2 * ranks - rank) for place in range(each)]
        for wrong, hint in (
            (positions(tokens, rank, ranks, "plain").tolist(), "this is the plain order, one piece of N"),
            (back, "pieces are counted from 0, so the last of 2N is piece 2N − 1"),
            (expected[each:] + expected[:each], "the earlier piece comes first: the mask of the rank's own block "
             "relies on it"),
            (expected[:each] + expected[each:][::-1], "tokens inside the second piece keep their order"),
            (expected[:each], "this is one piece; a rank has two"),
        ):  # fmt: skip
            if numbers == wrong:
                raise Mistake(f"{where} these are {_short(numbers)}: {hint}.")
        raise Mistake(f"{where} these are {_short(numbers)}; it should be {_short(expected)}.")
    return "Right: a piece from the front and its mirror image from the back."


def _short(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:12]))
    return f"{text}, …" if len(numbers) > 12 else text


Block = tuple[float, float, float]


def check_merge(function: Callable[[Block, Block], Block]) -> str:
    """``function(first, second)``: each block is its largest score, its sum relative to that, and its output."""
    draw = random.Random(fresh_seed())
    for shift in (0.0, 1000.0):
        for swapped in (False, True):
            # The blocks differ in largest score, in number of keys and in values, so that no wrong answer is right.
            scores = [[shift + draw.uniform(-1, 1) for _ in range(2)], [shift + draw.uniform(2, 4) for _ in range(3)]]
            values = [[draw.uniform(-2, -1) for _ in range(2)], [draw.uniform(1, 2) for _ in range(3)]]
            blocks = [_block(*each) for each in zip(scores, values, strict=True)]
            expected = _block(scores[0] + scores[1], values[0] + values[1])
            first, second = blocks[::-1] if swapped else blocks
            _check_merged(call(function, first, second), first, second, expected)
    return "Right, in either order, and for scores of 1,000, where exp alone would overflow."


def _block(scores: list[float], values: list[float]) -> Block:
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    total = sum(weights)
    return largest, total, sum(weight * value for weight, value in zip(weights, values, strict=True)) / total


def _check_merged(answer: object, first: Block, second: Block, expected: Block) -> None:
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise Mistake(f"It should return three numbers: largest, sum, output; not {answer!r}.")
    largest, total, out = (float(number) for number in answer)
    if not math.isclose(largest, expected[0], rel_tol=1e-9):
        raise Mistake(f"The largest score of both blocks is {expected[0]:.4g}, not {largest:.4g}.")
    if not math.isclose(total, expected[1], rel_tol=1e-6):
        if math.isclose(total, first[1] + second[1], rel_tol=1e-6):
            raise Mistake(
                f"Its sum is {total:.4g}, but should be {expected[1]:.4g}: the two sums are relative to different "
                "largest scores, and have to be brought to one before they are added."
            )
        raise Mistake(f"The sum is {expected[1]:.4g} (relative to the largest score), not {total:.4g}.")
    if not math.isclose(out, expected[2], rel_tol=1e-6):
        for wrong, hint in (
            ((first[2] + second[2]) / 2, "that is the plain mean; a block with larger scores weighs more"),
            ((first[1] * first[2] + second[1] * second[2]) / (first[1] + second[1]),
             "it is weighted by sums that are relative to different largest scores"),
            (expected[2] * expected[1], "it still has to be divided by the sum"),
        ):  # fmt: skip
            if math.isclose(out, wrong, rel_tol=1e-6):
                raise Mistake(f"The output is {expected[2]:.4g}, not {out:.4g}: {hint}.")
        raise Mistake(f"The output is {expected[2]:.4g}, not {out:.4g}.")


#: ranks, batch, tokens, hidden, heads, heads of keys: the ranks divide the last, so nothing has to be repeated; no two
#: mistakes are off by one factor in the first case.
CASES = ((4, 1, 8192, 6144, 24, 8), (8, 2, 65_536, 5120, 40, 8), (2, 1, 4096, 2048, 16, 16))


def check_bytes(function: Callable[[str, int, int, int, int, int, int], float]) -> str:
    """``function(way, ranks, batch, tokens, hidden, heads, kv_heads)``: what a rank sends in a layer, both passes."""
    for case in CASES:
        ranks, batch, tokens, hidden, heads, kv_heads = case
        kv_width = hidden * kv_heads // heads
        for way, expected in (
            ("ring", formulas.ring_bytes(batch, tokens, kv_width, ranks)),
            ("Ulysses", formulas.ulysses_bytes(batch, tokens, hidden, kv_width, ranks)),
        ):
            answer = call(function, way, *case)
            where = f"For {way}, {ranks} ranks, b = {batch}, s = {tokens}, h = {hidden}, {kv_heads} of {heads} heads,"
            if isinstance(answer, bool) or not isinstance(answer, int | float):
                raise Mistake(f"{where} it returned {type(answer).__name__}, not a number of bytes.")
            if math.isclose(answer, expected, rel_tol=1e-6):
                continue
            why = _why(answer / expected, way, ranks, kv_heads / heads)
            raise Mistake(f"{where} a rank sends {expected:,.0f} bytes, not {answer:,.0f}{why}")
    return "Right: three laps of keys and values, or four parts of 1 − 1/N in each pass."


def _why(factor: float, way: str, ranks: int, share: float) -> str:
    """What an answer overlooks that is off by ``factor``; ``share``: heads of keys over heads of queries."""
    own = [
        (2, "numbers have 2 bytes"),
        (ranks, "a rank has s/N tokens"),
    ]
    if way == "ring":
        own += [
            (1 / 3, "that is the forward pass alone"),
            (2 / 3, "backward, keys and values go round once more, and their gradients behind them"),
            (1 / 2, "both keys and values travel, in 2 bytes for each number"),
            (1 / share, "only the heads of keys and values travel"),
            (ranks / (ranks - 1), "the last of N steps has nobody to send to"),
        ]
    else:
        own += [
            (1 / 2, "that is the forward pass alone, or one byte for each number"),
            (2 / (1 + share), "keys and values have fewer heads than queries and outputs"),
            (ranks / (ranks - 1), "a rank's own part, 1/N, stays where it is"),
        ]
    return next((f": {hint}." for wrong, hint in own if math.isclose(factor, wrong, rel_tol=1e-6)), ".")


def my_positions(rank, ranks, tokens):
    each = tokens // (2 * ranks)  # tokens of a piece
    front, back = rank, 2 * ranks - 1 - rank
    return [piece * each + place for piece in (front, back) for place in range(each)]


def my_merge(first, second):
    largest = max(first[0], second[0])
    # Each sum was taken relative to its own block's largest score: bring both to the common one.
    sums = [math.exp(block[0] - largest) * block[1] for block in (first, second)]
    total = sum(sums)
    out = (sums[0] * first[2] + sums[1] * second[2]) / total
    return largest, total, out


def my_bytes(way, ranks, batch, tokens, hidden, heads, kv_heads):
    mine = 2 * batch * tokens // ranks * hidden  # bytes of one activation of this rank's tokens
    if way == "ring":
        laps = 3  # keys and values forward, again backward, and their gradients
        return laps * (ranks - 1) * 2 * mine * kv_heads / heads
    passes = 2  # forward and backward
    return passes * (ranks - 1) / ranks * mine * (2 + 2 * kv_heads / heads)
