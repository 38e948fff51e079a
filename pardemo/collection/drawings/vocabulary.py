"""The loss over a vocabulary that is cut: three numbers of each token travel, and no logits."""

import math

from pardemo.collection.drawings.key import DONE, RANKS, WHOLE
from pardemo.collection.drawings.svg import Canvas, Drawing

#: The logits of one token over a vocabulary of eight, and its label.
LOGITS, LABEL = (2, 1, 0, 3, 1, 4, 0, 2), 7
_TALK, _CELL, _LEFT = DONE["communication"], 62, (36, 340)


def vocabulary_loss() -> Drawing:
    """One token's logits on two ranks, and how its loss comes about without bringing them together."""
    canvas = Canvas(640, 462)
    half = len(LOGITS) // 2
    largest, sums, labels = three_numbers()
    top, total, picked = max(largest), sum(sums), sum(labels)
    for rank, x in enumerate(_LEFT):
        canvas.text(x + 2 * _CELL, 20, f"rank {rank}", size=22, bold=True)
        for place in range(half):
            token = rank * half + place
            canvas.text(x + (place + 0.5) * _CELL, 50, str(token), size=18)
            canvas.box(x + place * _CELL, 66, _CELL, 42, RANKS[rank], str(LOGITS[token]))
    label = _LEFT[LABEL // half] + LABEL % half * _CELL
    canvas.box(label, 66, _CELL, 42, thick=4)
    canvas.text(320, 50, "token", size=18)
    canvas.text(_LEFT[1] + 3.5 * _CELL, 126, "the label", size=18)
    canvas.text(_LEFT[0], 126, "logits of one position", size=18, anchor="start")
    rows = (
        ("largest logit", [f"{n}" for n in largest], "max", f"{top}"),
        (f"sum of exp(logit − {top})", [f"{n:.2f}" for n in sums], "sum", f"{total:.2f}"),
        (f"the label's logit − {top}", [_plain(n) for n in labels], "sum", _plain(picked)),
    )
    canvas.text(300, 170, "rank 0", size=18)
    canvas.text(390, 170, "rank 1", size=18)
    canvas.text(560, 170, "on both", size=18)
    for number, (name, values, how, result) in enumerate(rows):
        y = 190 + 54 * number
        canvas.text(_LEFT[0], y + 20, name, size=19, anchor="start")
        for rank, value in enumerate(values):
            canvas.box(262 + 90 * rank, y, 76, 40, RANKS[rank], value)
        canvas.text(478, y + 9, how, size=18, fill=_TALK, bold=True)
        canvas.arrow([(434, y + 24), (518, y + 24)], _TALK)
        canvas.box(522, y, 76, 40, WHOLE, result)
    canvas.text(
        320, 378, f"loss = log {total:.2f} − ({_plain(picked)}) = {math.log(total) - picked:.2f}", size=22, bold=True
    )
    canvas.text(320, 416, "3 numbers of each token travel instead of its V logits:", size=18)
    canvas.text(320, 442, "in Baichuan2 V is 125,696.", size=18)
    return Drawing(
        canvas,
        f"A token's eight logits, four on each of two ranks. Only the largest, {top}, the sum of the exponentials, "
        f"{total:.2f}, and the label's logit are all-reduced; the loss {math.log(total) - picked:.2f} follows from "
        "these three numbers.",
    )


def three_numbers() -> tuple[list[int], list[float], list[int]]:
    """By rank: the largest logit; relative to the largest of all the sum of exponentials, and the label's logit."""
    half = len(LOGITS) // 2
    parts = LOGITS[:half], LOGITS[half:]
    largest = [max(part) for part in parts]
    top = max(largest)
    sums = [sum(math.exp(logit - top) for logit in part) for part in parts]
    labels = [LOGITS[LABEL] - top if LABEL // half == rank else 0 for rank in range(2)]
    return largest, sums, labels


def _plain(number: int) -> str:
    return str(number).replace("-", "−")
