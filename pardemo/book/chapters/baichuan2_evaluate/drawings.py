"""Drawings of what is scored: the words that two headlines share, and the four answers that compete."""

from collections.abc import Sequence

from pardemo.book.chapters.baichuan2_finetune.drawings import LABELLED, common_in_order
from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, SHADES, WHOLE


@drawing(262)
def shared_words(
    canvas: Canvas, wanted: Sequence[str], answer: Sequence[str], names: Sequence[str] = ("wanted", "answer")
) -> str:
    """The words of two headlines, one above the other, and lines between equal ones.

    Thick lines join the longest common subsequence, which ROUGE-L counts; dashed ones join words that are in both and
    out of order, which only ROUGE-1 counts.
    """
    in_order = common_in_order(wanted, answer)
    lines = dict.fromkeys(in_order, True)
    matched = [{i for i, _ in in_order}, {j for _, j in in_order}]
    for i, word in enumerate(wanted):
        j = next((j for j, other_word in enumerate(answer) if other_word == word and j not in matched[1]), None)
        if i not in matched[0] and j is not None:
            lines[i, j] = False
            matched[0].add(i)
            matched[1].add(j)
    above = _words(canvas, 30, wanted, matched[0])
    below = _words(canvas, 158, answer, matched[1])
    canvas.text(4, 14, names[0], "start")
    canvas.text(4, 216, names[1], "start")
    for (i, j), ordered in lines.items():
        colour = "currentColor" if ordered else DONE["communication"]
        canvas.line([(above[i], 74), (below[j], 156)], colour, 3.5 if ordered else 2.5, dashed=not ordered)
    canvas.line([(14, 246), (54, 246)], thick=3.5)
    canvas.text(62, 246, "in the same order", "start")
    canvas.line([(254, 246), (294, 246)], DONE["communication"], 2.5, dashed=True)
    canvas.text(302, 246, "in both, out of order", "start")
    return (
        f"{names[0]}: {' '.join(wanted)}; {names[1]}: {' '.join(answer)}. {len(lines)} words are in both, "
        f"{len(in_order)} of them in the same order."
    )


@drawing(344)
def four_answers(canvas: Canvas) -> None:
    """From a row of news four headlines are made: its first sentence; the base model's, given the instruction; the base
    model's, given plain text; the tuned model's, W with LoRA, given the instruction. Each is scored against the wanted
    one."""
    frozen = SHADES["frozen parameters"]
    canvas.box(8, 40, 74, 270, "none", "news", size=22)
    canvas.box(546, 40, 90, 270, LABELLED, "wanted", size=20)
    rows = (
        ("", None, "first sentence"),
        ("instruction", False, "base, instructed"),
        ("plain text", False, "base, its own form"),
        ("instruction", True, "tuned"),
    )
    for index, (prompt, adapted, name) in enumerate(rows):
        y = 70 + 70 * index
        canvas.arrow([(85, y), (196 if prompt else 330, y)])
        if prompt:
            canvas.text(138, y - 16, prompt)
            canvas.box(199, y - 22, 44, 44, frozen, "W", size=22)
            if adapted:
                canvas.box(249, y - 22, 54, 44, KEPT["parameters"], "LoRA")
            canvas.arrow([(306 if adapted else 246, y), (330, y)])
        canvas.box(333, y - 22, 180, 44, "none", name)
        canvas.arrow([(516, y), (543, y)], both=True)
    canvas.text(8, 20, "a row of the test", "start")
    canvas.text(636, 20, "each is scored against", "end")


def _words(canvas: Canvas, y: float, words: Sequence[str], used: set[int]) -> list[float]:
    """Boxes in a row; returns where the middle of each is."""
    widths = [20 * sum(1 if ord(c) > 0x2E80 else 0.6 for c in word) + 10 for word in words]
    room = sum(widths) + 5 * (len(words) - 1)
    scale, x, middles = min(1.0, 632 / room), 4.0, []
    for index, (word, width) in enumerate(zip(words, widths, strict=True)):
        fill = LABELLED if index in used else WHOLE
        canvas.box(x, y, scale * width, 42, fill, word, size=20 * scale)
        middles.append(x + scale * width / 2)
        x += scale * (width + 5)
    return middles
