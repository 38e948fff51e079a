"""Texts as a model and a score see them: a row's tokens and which of them carry loss; the words two headlines share."""

from collections.abc import Mapping, Sequence

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import KEPT, VERDICTS, WHOLE
from pardemo.draw.parts import legend

LEFT, SIDE, LOW = 4, 37, 46  # of the first token; between two tokens of a line, and between two lines
LABELLED = KEPT["gradients"]
#: How tokens that are no characters of the text are shown: Baichuan2's pieces of the two roles, EOS, a line's end.
NAMES = {"<reserved_106>": "user:", "<reserved_107>": "assistant:", "</s>": "end", "\n": "↵"}


def labelled_tokens(pieces: Sequence[str], labels: Sequence[bool]) -> Drawing:
    """A sample's tokens in reading order, line by line; coloured are those that have a label.

    Args:
        pieces: each token, as the tokenizer names it. labels: whether it has a label.
    """
    pieces = [NAMES.get(piece, piece) for piece in pieces]
    places, x, y = [], LEFT, 30
    for piece in pieces:
        width = SIDE if len(piece) == 1 else 12 * len(piece) + 8
        if x + width > 636:
            x, y = LEFT, y + LOW
        places.append((x, y, width - 4))
        x += width
    canvas = Canvas(640, y + LOW)
    legend(canvas, LEFT, 12, {"the prompt: read only": WHOLE, "has a label: counts in the loss": LABELLED})
    for (x, y, width), piece, counts in zip(places, pieces, labels, strict=True):
        size = 22 if len(piece) == 1 else 18
        canvas.box(x, y, width, 38, LABELLED if counts else WHOLE, piece, size=size, thick=2.5 if counts else 1)
    counted = sum(labels)
    return Drawing(
        canvas,
        f"The {len(pieces)} tokens of a sample: {''.join(pieces)}. The last {counted} of them, "
        f"{''.join(pieces[-counted:])}, have a label and are coloured; the prompt before them has none.",
    )


def cut_tails(prompt: int, answer: int, limit: int) -> Drawing:
    """A sample that is too long: prompt and answer each lose their tails, in proportion; the end token is lost."""
    canvas, total = Canvas(640, 212), prompt + answer
    unit = 620 / total
    canvas.text(10, 16, f"{total:,} tokens", size=18, anchor="start")
    x = 10.0
    for count, fill in ((prompt, WHOLE), (answer, LABELLED)):
        kept = limit * count // total
        canvas.box(x, 34, kept * unit, 46, fill, f"{kept:,}", size=20)
        canvas.box(x + kept * unit, 34, (count - kept) * unit, 46, "none", "cut", size=18, dashed=True)
        x += count * unit
    canvas.text(10, 100, f"prompt: {prompt:,}", size=18, anchor="start")
    canvas.text(630, 100, f"answer, with its end token: {answer:,}", size=18, anchor="end")
    canvas.text(10, 136, f"cutoff_len {limit:,}", size=18, anchor="start")
    first, second = (limit * count // total for count in (prompt, answer))
    canvas.box(10, 154, first * unit, 46, WHOLE, f"{first:,}", size=20)
    canvas.box(10 + first * unit, 154, second * unit, 46, LABELLED, f"{second:,}", size=20)
    canvas.text(20 + (first + second) * unit, 177, "no end token: nothing says stop", size=18, anchor="start")
    return Drawing(
        canvas,
        f"A prompt of {prompt:,} tokens and an answer of {answer:,}, cut to {limit:,}: each keeps its head, {first:,} "
        f"and {second:,}, and the answer loses its end token.",
    )


def rows_seen(ways: Mapping[str, Sequence[bool]]) -> Drawing:
    """Each way's test rows as boxes; dark are those that are in the training file as well.

    Args:
        ways: name of a split -> for each test row, whether it is in the training file.
    """
    canvas = Canvas(640, 78 * len(ways) + 34)
    for row, (name, in_training) in enumerate(ways.items()):
        y, side = 12 + 78 * row, 620 / max(len(in_training), 1)
        label = f"{name}: {sum(in_training)} of {len(in_training)} test rows are in the training file"
        canvas.text(10, y, label, size=18, anchor="start")
        for trained, fill in ((True, VERDICTS["fails"]), (False, WHOLE)):
            places = [(10 + side * k, y + 16, side - 5, 34) for k, flag in enumerate(in_training) if flag is trained]
            canvas.boxes(places, fill)
    legend(canvas, 10, canvas.height - 14, {"seen in training": VERDICTS["fails"], "new to the model": WHOLE})
    values_text = ", ".join(f"{name} {sum(in_training)} of {len(in_training)}" for name, in_training in ways.items())
    return Drawing(canvas, f"Test rows that are in the training file as well: {values_text}.")


def common_in_order(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """A longest common subsequence of two lists of words, as pairs of their places."""
    best: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in range(len(first), -1, -1):
        for j in range(len(second), -1, -1):
            if i == len(first) or j == len(second):
                best[i, j] = []
            elif first[i] == second[j]:
                best[i, j] = [(i, j), *best[i + 1, j + 1]]
            else:
                best[i, j] = max(best[i + 1, j], best[i, j + 1], key=len)
    return best[0, 0]
