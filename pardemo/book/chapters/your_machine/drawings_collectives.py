"""The collectives, a frame for each: what each rank holds before and after."""

from pardemo.draw.canvas import Canvas
from pardemo.draw.palette import WHOLE, rank_colour
from pardemo.draw.player import Player

_CELL, _HIGH, _TOP, _LEFT = 52, 40, 78, 78
#: (number, rank that it comes from, or None if it is a sum); None where a rank has nothing, or nothing of use.
Cell = tuple[int, int | None] | None
Table = list[list[Cell]]


def collectives(ranks: int = 4) -> Player:
    """Broadcast, reduce, all-reduce, reduce-scatter, all-gather, all-to-all, and a message, with N numbers on N ranks.

    Args:
        ranks: N, from 2 to 4. Rank r begins with the numbers 10·r, 10·r + 1, …

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 4:
        raise ValueError(f"collectives of 2 to 4 ranks can be drawn, not of {ranks}")
    everyone = range(ranks)
    whole: Table = [[(10 * rank + place, rank) for place in everyone] for rank in everyone]
    sums: list[Cell] = [(sum(10 * rank + place for rank in everyone), None) for place in everyone]
    nothing: list[Cell] = [None] * ranks

    def only(row: list[Cell], places: list[int]) -> list[Cell]:
        return [cell if place in places else None for place, cell in enumerate(row)]

    own_parts = [only(whole[rank], [0]) for rank in everyone]
    others = range(1, ranks)
    tables = {
        "broadcast": (
            [whole[0], *[nothing for _ in others]], [whole[0]] * ranks, "everybody gets what rank 0 has.",
        ),
        "reduce": (whole, [sums, *[nothing for _ in others]], "rank 0 gets the sum of all, number by number."),
        "all-reduce": (whole, [sums] * ranks, "everybody gets the sum."),
        "reduce-scatter": (
            whole, [only(sums, [rank]) for rank in everyone], "everybody gets the sum of one part.",
        ),
        "all-gather": (
            own_parts, [[whole[rank][0] for rank in everyone]] * ranks, "everybody gets everybody's part.",
        ),
        "all-to-all": (
            whole, [[whole[rank][place] for rank in everyone] for place in everyone],
            "part c of each rank goes to rank c: rows become columns.",
        ),
        "send and receive": (
            [whole[0], *[nothing for _ in others]], [whole[0], whole[0], *[nothing for _ in others[1:]]],
            "rank 0 sends to rank 1 alone; a copy stays. This one is no collective: the others do not take part.",
        ),
    }  # fmt: skip
    frames = [
        (_frame(name, before, after), f"{name.capitalize()}: {caption}")
        for name, (before, after, caption) in tables.items()
    ]
    return Player(frames, f"seven ways to talk, on {ranks} ranks", start=list(tables).index("all-reduce"))


def _frame(name: str, before: Table, after: Table) -> Canvas:
    ranks = len(before)
    canvas = Canvas(640, _TOP + ranks * (_HIGH + 8) + 6)
    wide = ranks * _CELL
    right = 640 - 14 - wide
    canvas.text(320, 20, name, size=22, bold=True)
    for x, word in ((_LEFT, "before"), (right, "after")):
        canvas.text(x + wide / 2, 56, word, size=18)
    for rank in range(ranks):
        y = _TOP + rank * (_HIGH + 8)
        canvas.text(_LEFT - 8, y + _HIGH / 2, f"rank {rank}", size=18, anchor="end")
        _row(canvas, _LEFT, y, before[rank])
        _row(canvas, right, y, after[rank])
    middle = _TOP + ranks * (_HIGH + 8) / 2 - 4
    canvas.arrow([(_LEFT + wide + 18, middle), (right - 18, middle)])
    return canvas


def _row(canvas: Canvas, x: float, y: float, cells: list[Cell]) -> None:
    for place, cell in enumerate(cells):
        at = x + place * _CELL
        if cell is None:
            canvas.box(at, y, _CELL, _HIGH, thick=1, dashed=True)
            continue
        number, owner = cell
        fill = WHOLE if owner is None else rank_colour(owner)
        canvas.box(at, y, _CELL, _HIGH, fill, str(number), size=20, bold=owner is None)
