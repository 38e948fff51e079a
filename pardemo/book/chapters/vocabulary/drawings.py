"""A vocabulary cut over two ranks: the lookup of words, and a loss that all-reduces three numbers a token."""

import math

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, RANKS, WHOLE
from pardemo.draw.parts import half_of, legend

#: The logits of one token over a vocabulary of eight, and its label.
LOGITS, LABEL = (2, 1, 0, 3, 1, 4, 0, 2), 7
TOKENS = (3, 0, 3)  # to look up in a table of four words
_TALK = DONE["communication"]


@drawing(446)
def vocabulary_cut(canvas: Canvas) -> None:
    """A model on two ranks. The blocks are cut. On the left embedding, output head and logits are whole on both ranks;
    on the right each rank has a half of them: an all-reduce follows the embedding, and the loss needs three numbers a
    token."""
    model = {
        64: ("embedding", "V × h weights"),
        172: ("blocks", "cut already"),
        236: ("output head", "V × h weights"),
        300: ("logits", "b·s × V numbers"),
    }
    canvas.text(287, 20, "whole vocabulary", size=20, bold=True)
    canvas.text(533, 20, "cut vocabulary", size=20, bold=True)
    wide, high, columns = 100, 52, ((184, 0), (290, 1), (430, 0), (536, 1))
    for x, rank in columns:
        canvas.text(x + wide / 2, 48, f"rank {rank}")
    for y, (name, note) in model.items():
        canvas.text(6, y + 15, name, "start", bold=True, size=20)
        canvas.text(6, y + 39, note, "start")
        for x, rank in columns:
            if x < 400 and name != "blocks":
                canvas.box(x, y, wide, high, WHOLE, "all of it")
            else:
                half_of(canvas, x, y, wide, high, rank)
    canvas.box(430, 128, 206, 32, _TALK, "all-reduce")
    canvas.box(430, 364, 206, 32, _TALK, "3 numbers per token")
    legend(canvas, 184, 418, {"whole on both": WHOLE})


@drawing(462)
def vocabulary_loss(canvas: Canvas) -> str:
    """One token's logits on two ranks, and how its loss is computed without gathering them."""
    half, lefts, cell = len(LOGITS) // 2, (36, 340), 62
    largest, sums, labels = three_numbers()
    top, total, picked = max(largest), sum(sums), sum(labels)
    loss = top + math.log(total) - picked
    for rank, x in enumerate(lefts):
        canvas.text(x + 2 * cell, 20, f"rank {rank}", size=22, bold=True)
        for index in range(half):
            word = rank * half + index
            canvas.text(x + (index + 0.5) * cell, 50, str(word))
            canvas.box(x + index * cell, 66, cell, 42, RANKS[rank], str(LOGITS[word]), size=20)
    label = lefts[LABEL // half] + LABEL % half * cell
    canvas.box(label, 66, cell, 42, thick=4)
    canvas.text(0, 50, "word", "start")
    canvas.text(lefts[1] + 3.5 * cell, 126, "the label")
    canvas.text(lefts[0], 126, "logits of one position", "start")
    rows = (
        ("largest logit", [f"{n}" for n in largest], "max", f"{top}"),
        (f"sum of exp(logit − {top})", [f"{n:.2f}" for n in sums], "sum", f"{total:.2f}"),
        ("the label's logit", [f"{n}" for n in labels], "sum", f"{picked}"),
    )
    for x, words in ((300, "rank 0"), (390, "rank 1"), (560, "on both")):
        canvas.text(x, 170, words)
    for number, (name, values, operation, result) in enumerate(rows):
        y = 190 + 54 * number
        canvas.text(lefts[0], y + 20, name, "start", size=19)
        for rank, value in enumerate(values):
            canvas.box(262 + 90 * rank, y, 76, 40, RANKS[rank], value, size=20)
        canvas.text(478, y + 9, operation, fill=_TALK, bold=True)
        canvas.arrow([(434, y + 24), (518, y + 24)], _TALK)
        canvas.box(522, y, 76, 40, WHOLE, result, size=20)
    canvas.text(320, 378, f"loss = {top} + log {total:.2f} − {picked} = {loss:.2f}", size=22, bold=True)
    canvas.text(320, 416, "For each token 3 numbers travel instead of its V logits:")
    canvas.text(320, 442, "in Baichuan2 V is 125,696.")
    return (
        f"A token's eight logits, four on each of two ranks. Only the largest, {top}, the sum of the exponentials, "
        f"{total:.2f}, and the label's logit are all-reduced; the loss {loss:.2f} follows from "
        "these three numbers."
    )


@drawing(330)
def vocabulary_lookup(canvas: Canvas) -> None:
    """A table of four words, rows 0 and 1 on rank 0, rows 2 and 3 on rank 1. Of the tokens 3, 0, 3 rank 0 finds the
    second, rank 1 the others, and each puts zeros for the rest. The all-reduce gives both ranks all three rows."""
    for x, words in ((61, "the table"), (217, "looks up 3, 0, 3"), (551, "on both")):
        canvas.text(x, 20, words, bold=True, size=20)
    for rank, top in enumerate((64, 206)):
        canvas.text(10, top - 18, f"rank {rank}", "start")
        for index in range(2):
            word = 2 * rank + index
            canvas.box(10, top + 43 * index, 102, 40, RANKS[rank], f"row {word}", size=20)
        canvas.arrow([(114, top + 41), (146, top + 41)])
        for index, word in enumerate(TOKENS):
            fill, text = (RANKS[rank], f"row {word}") if word // 2 == rank else (WHOLE, "0")
            canvas.box(150, top - 14 + 38 * index, 134, 35, fill, text, size=20)
        canvas.arrow([(286, top + 41), (350, top + 41), (350, 146 if rank == 0 else 186)], _TALK)
    canvas.box(304, 148, 132, 36, _TALK, "all-reduce", size=20)
    canvas.arrow([(438, 166), (480, 166)], _TALK)
    for index, word in enumerate(TOKENS):
        canvas.box(484, 109 + 38 * index, 134, 35, RANKS[word // 2], f"row {word}", size=20)


def three_numbers() -> tuple[list[int], list[float], list[int]]:
    """By rank: the largest logit, the sum of exponentials relative to the largest of all, and the label's logit."""
    half = len(LOGITS) // 2
    parts = LOGITS[:half], LOGITS[half:]
    largest = [max(part) for part in parts]
    top = max(largest)
    sums = [sum(math.exp(logit - top) for logit in part) for part in parts]
    labels = [LOGITS[LABEL] if LABEL // half == rank else 0 for rank in range(2)]
    return largest, sums, labels
