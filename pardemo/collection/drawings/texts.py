"""Texts as a model and a score see them: a row's tokens and which of them carry loss; the words two headlines share."""

from collections.abc import Mapping, Sequence

from pardemo.collection.drawings.key import DONE, KEPT, SHADES, VERDICTS, WHOLE
from pardemo.collection.drawings.parts import legend
from pardemo.collection.drawings.svg import Canvas, Drawing

LEFT, SIDE, LOW = 4, 37, 46  # of the first token; between two tokens of a line, and between two lines
LABELLED = KEPT["gradients"]
#: How tokens that are no characters of the text are shown: Baichuan2's pieces of the two roles, EOS, a line's end.
NAMES = {"<reserved_106>": "user:", "<reserved_107>": "assistant:", "</s>": "end", "\n": "↵"}


def labelled_tokens(pieces: Sequence[str], labels: Sequence[bool]) -> Drawing:
    """A sample's tokens in reading order, line by line; coloured are those that have a label.

    Args:
        pieces: of each token, as the tokenizer names it.
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
    canvas, whole = Canvas(640, 212), prompt + answer
    unit = 620 / whole
    canvas.text(10, 16, f"{whole:,} tokens", size=18, anchor="start")
    x = 10.0
    for count, fill in ((prompt, WHOLE), (answer, LABELLED)):
        kept = limit * count // whole
        canvas.box(x, 34, kept * unit, 46, fill, f"{kept:,}", size=20)
        canvas.box(x + kept * unit, 34, (count - kept) * unit, 46, "none", "cut", size=18, dashed=True)
        x += count * unit
    canvas.text(10, 100, f"prompt: {prompt:,}", size=18, anchor="start")
    canvas.text(630, 100, f"answer, with its end token: {answer:,}", size=18, anchor="end")
    canvas.text(10, 136, f"cutoff_len {limit:,}", size=18, anchor="start")
    first, second = (limit * count // whole for count in (prompt, answer))
    canvas.box(10, 154, first * unit, 46, WHOLE, f"{first:,}", size=20)
    canvas.box(10 + first * unit, 154, second * unit, 46, LABELLED, f"{second:,}", size=20)
    canvas.text(20 + (first + second) * unit, 177, "no end token: nothing says stop", size=18, anchor="start")
    return Drawing(
        canvas,
        f"A prompt of {prompt:,} tokens and an answer of {answer:,}, cut to {limit:,}: each keeps its head, {first:,} "
        f"and {second:,}, and the answer loses its end token.",
    )


def rows_seen(ways: Mapping[str, Sequence[bool]]) -> Drawing:
    """Each way's test rows as boxes; dark are those that are in the training file as well."""
    canvas = Canvas(640, 78 * len(ways) + 34)
    for row, (name, seen) in enumerate(ways.items()):
        y, side = 12 + 78 * row, 620 / max(len(seen), 1)
        told = f"{name}: {sum(seen)} of {len(seen)} test rows are in the training file"
        canvas.text(10, y, told, size=18, anchor="start")
        for known, fill in ((True, VERDICTS["fails"]), (False, WHOLE)):
            places = [(10 + side * k, y + 16, side - 5, 34) for k, one in enumerate(seen) if one is known]
            canvas.boxes(places, fill)
    legend(canvas, 10, canvas.height - 14, {"seen in training": VERDICTS["fails"], "new to the model": WHOLE})
    told = ", ".join(f"{name} {sum(seen)} of {len(seen)}" for name, seen in ways.items())
    return Drawing(canvas, f"Test rows that are in the training file as well: {told}.")


def shared_words(wanted: Sequence[str], found: Sequence[str], names: Sequence[str] = ("wanted", "found")) -> Drawing:
    """The words of two headlines, one above the other, and lines between equal ones.

    Thick lines join the longest common subsequence, which ROUGE-L counts; dashed ones join words that are in both and
    out of order, which only ROUGE-1 counts.
    """
    in_order = common_in_order(wanted, found)
    lines = dict.fromkeys(in_order, True)
    taken = [{i for i, _ in in_order}, {j for _, j in in_order}]
    for i, word in enumerate(wanted):
        j = next((j for j, other in enumerate(found) if other == word and j not in taken[1]), None)
        if i not in taken[0] and j is not None:
            lines[i, j] = False
            taken[0].add(i)
            taken[1].add(j)
    canvas = Canvas(640, 262)
    above = _words(canvas, 30, wanted, taken[0])
    below = _words(canvas, 158, found, taken[1])
    canvas.text(4, 14, names[0], size=18, anchor="start")
    canvas.text(4, 216, names[1], size=18, anchor="start")
    for (i, j), ordered in lines.items():
        colour = "currentColor" if ordered else DONE["communication"]
        canvas.line([(above[i], 74), (below[j], 156)], colour, 3.5 if ordered else 2.5, dashed=not ordered)
    canvas.line([(14, 246), (54, 246)], thick=3.5)
    canvas.text(62, 246, "in the same order", size=18, anchor="start")
    canvas.line([(254, 246), (294, 246)], DONE["communication"], 2.5, dashed=True)
    canvas.text(302, 246, "in both, out of order", size=18, anchor="start")
    return Drawing(
        canvas,
        f"{names[0]}: {' '.join(wanted)}; {names[1]}: {' '.join(found)}. {len(lines)} words are in both, "
        f"{len(in_order)} of them in the same order.",
    )


def four_answers() -> Drawing:
    """What competes for one row of news: the first sentence, a base model asked in two ways, and the tuned model."""
    canvas, frozen = Canvas(640, 344), SHADES["frozen parameters"]
    canvas.box(8, 40, 74, 270, "none", "news", size=22)
    canvas.box(546, 40, 90, 270, LABELLED, "wanted", size=20)
    rows = (
        ("", None, "first sentence"),
        ("instruction", False, "base, instructed"),
        ("plain text", False, "base, its own form"),
        ("instruction", True, "tuned"),
    )
    for place, (asked, adapted, name) in enumerate(rows):
        y = 70 + 70 * place
        canvas.arrow([(85, y), (196 if asked else 330, y)])
        if asked:
            canvas.text(138, y - 16, asked, size=18)
            canvas.box(199, y - 22, 44, 44, frozen, "W", size=22)
            if adapted:
                canvas.box(249, y - 22, 54, 44, KEPT["parameters"], "A, B", size=18)
            canvas.arrow([(306 if adapted else 246, y), (330, y)])
        canvas.box(333, y - 22, 180, 44, "none", name, size=18)
        canvas.arrow([(516, y), (543, y)], both=True)
    canvas.text(8, 20, "a row of the test", size=18, anchor="start")
    canvas.text(636, 20, "each is scored against", size=18, anchor="end")
    return Drawing(
        canvas,
        "From a row of news four headlines are made: its first sentence; the base model's, given the instruction; the "
        "base model's, given plain text; the tuned model's, W with A and B, given the instruction. Each is scored "
        "against the wanted one.",
    )


def common_in_order(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
    """Places of a longest common subsequence."""
    best: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in range(len(one), -1, -1):
        for j in range(len(other), -1, -1):
            if i == len(one) or j == len(other):
                best[i, j] = []
            elif one[i] == other[j]:
                best[i, j] = [(i, j), *best[i + 1, j + 1]]
            else:
                best[i, j] = max(best[i + 1, j], best[i, j + 1], key=len)
    return best[0, 0]


def _words(canvas: Canvas, y: float, words: Sequence[str], used: set[int]) -> list[float]:
    """Boxes in a row; returns where the middle of each is."""
    widths = [20 * sum(1 if ord(c) > 0x2E80 else 0.6 for c in word) + 10 for word in words]
    room = sum(widths) + 5 * (len(words) - 1)
    scale, x, middles = min(1.0, 632 / room), 4.0, []
    for place, (word, width) in enumerate(zip(words, widths, strict=True)):
        fill = LABELLED if place in used else WHOLE
        canvas.box(x, y, scale * width, 42, fill, word, size=20 * scale)
        middles.append(x + scale * width / 2)
        x += scale * (width + 5)
    return middles
