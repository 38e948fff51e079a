"""The exercises of this chapter, and what checks an answer to each."""

import difflib
from collections.abc import Callable

from pardemo.book.page.exercises import Mistake, call, exercise, formula


@formula(
    [(list(p), list(r)) for p, r in (
        ("abcd", "abcd"), ("ac", "abcd"), ("dcba", "abcd"), ("axbycz", "abc"), ("", "abc"), ("xyz", "abc"),
        ("abcbdab", "bdcaba"),
    )],
    "Order counts, gaps do not.",
)  # fmt: skip
def check_rouge_l(predicted: list[str], reference: list[str]):
    """The F1 of the longest common subsequence, per cent."""
    common = _longest(predicted, reference)
    right = 200 * common / (len(predicted) + len(reference))
    return right, [
        (100 * common / len(reference), "that is the recall alone: long predictions have to pay too"),
        (right / 100, "per cent, please"),
        (
            200 * _in_blocks(predicted, reference) / (len(predicted) + len(reference)),
            "the longest run first, as difflib matches, can block a longer subsequence",
        ),
        (lambda _: not common, "nothing in common scores 0"),
        (lambda _: True, f"{common} words in common, in order; F1 is 2·common / (both lengths)"),
    ]


def _in_blocks(predicted: list[str], reference: list[str]) -> int:
    matcher = difflib.SequenceMatcher(None, predicted, reference, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks())


def _longest(predicted: list[str], reference: list[str]) -> int:
    row = [0] * (len(reference) + 1)
    for a in predicted:
        before = 0
        for j, b in enumerate(reference, 1):
            before, row[j] = row[j], before + 1 if a == b else max(row[j], row[j - 1])
    return row[-1]


def check_split(function: Callable[[list[tuple[str, str]], int], tuple[list, list]]) -> str:
    """``function(pairs, count)`` splits without a body in both."""
    pairs = [(f"body {i % 30}", f"headline {i}") for i in range(50)]
    answer = call(function, list(pairs), 10)
    try:
        train, test = (list(part) for part in answer)
    except (TypeError, ValueError):
        raise Mistake(f"Return (train, test), two lists of pairs, not {type(answer).__name__}.") from None
    if len(test) != 10:
        raise Mistake(f"test has {len(test)} pairs, not 10.")
    if unknown := [pair for pair in train + test if pair not in pairs]:
        raise Mistake(f"{unknown[0]!r} is none of the pairs.")
    if both := {body for body, _ in train} & {body for body, _ in test}:
        raise Mistake(f"{len(both)} bodies are in both, such as {min(both)!r}: the model has seen them.")
    if len(train) < 20:
        raise Mistake(f"Only {len(train)} pairs are left to train on: drop no more than the bodies of the test pairs.")
    return "What the test measures, training has not seen."


@exercise("rouge_l")
def my_rouge_l(predicted, reference):
    """Ask for the first i words of one list and the first j of the other, and answer from smaller i and j: do the
    two last words match or not? F1 then needs only that length and those of both lists."""
    # longest[i][j] is for the first i words of predicted and the first j of reference.
    longest = [[0] * (len(reference) + 1) for _ in range(len(predicted) + 1)]
    for i, word in enumerate(predicted):
        for j, other in enumerate(reference):
            if word == other:
                longest[i + 1][j + 1] = longest[i][j] + 1
            else:
                longest[i + 1][j + 1] = max(longest[i][j + 1], longest[i + 1][j])
    return 100 * 2 * longest[-1][-1] / (len(predicted) + len(reference))


@exercise("split")
def my_split(pairs, count):
    """Choose the test pairs first. Then go through the rest: what gives away a test pair is its body, not the whole
    pair."""
    test = pairs[:count]
    seen = {body for body, _ in test}
    # A headline to a body that training has seen would be known by heart.
    train = [(body, headline) for body, headline in pairs if body not in seen]
    return train, test
