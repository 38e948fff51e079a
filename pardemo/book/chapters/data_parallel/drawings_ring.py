"""The ring all-reduce, step by step."""

from pardemo.draw.canvas import Canvas
from pardemo.draw.palette import DONE, rank_colour
from pardemo.draw.parts import unbroken
from pardemo.draw.player import Player

_CELL, _TOP, _MARGIN = 44, 60, 96
_ROOM = 640 - _MARGIN - 20  # between the numbers of the chunks and the line that leads back


def ring_all_reduce(ranks: int = 4, laps: int = 2) -> Player:
    """A ring all-reduce in 2(N − 1) steps: which ranks' numbers each chunk contains, and which chunk was just sent.

    A chunk is a row with room for N parts. Each part stands for a rank whose numbers have been added; they are in the
    order in which they were added. The player starts at the end of the reduce-scatter.

    Args:
        ranks: N, from 2 to 5. laps: 2, or 1 for the reduce-scatter alone.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 5:
        raise ValueError(f"a ring of 2 to 5 ranks can be drawn, not of {ranks}")
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]  # held[rank][chunk]: whose numbers are in it
    names = [str(chunk) for chunk in range(ranks)]
    frames = [(_frame(held, [], ranks, names), _beginning(ranks))]
    for step in range(laps * (ranks - 1)):
        sent = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        if step >= ranks - 1:
            sent = [(rank, (rank + 1 - (step - ranks + 1)) % ranks) for rank in range(ranks)]
        before = [[set(chunk) for chunk in row] for row in held]
        for rank, chunk in sent:
            to = (rank + 1) % ranks
            held[to][chunk] = before[rank][chunk] | (before[to][chunk] if step < ranks - 1 else set())
        frames.append((_frame(held, sent, ranks, names), _caption(step, ranks, sent, names)))
    name = "ring all-reduce" if laps == 2 else "reduce-scatter round a ring"
    return Player(frames, f"{name}, {ranks} ranks", start=ranks - 1, first=0)


def _beginning(ranks: int) -> str:
    return (
        f"Each of {ranks} ranks has a tensor of its own, cut into {ranks} chunks, the rows. A coloured part with r in "
        "it: rank r's numbers are in this sum. So far each chunk has only its own rank's numbers."
    )


def _caption(step: int, ranks: int, sent: list[tuple[int, int]], names: list[str]) -> str:
    first = f"rank 0 sends chunk {names[sent[0][1]]} to rank 1"
    if step < ranks - 1:
        end = " Now each rank has one chunk with everybody's numbers: reduce-scatter is done." * (step == ranks - 2)
        return (
            f"Reduce-scatter, step {step + 1} of {ranks - 1}: {first}, which adds it to its own; all send at once.{end}"
        )
    at = step - ranks + 2
    count = unbroken(f"2({ranks} − 1)")
    end = f" Every rank has the whole sum, and has sent {count} chunks of S/{ranks}." * (at == ranks - 1)
    return f"All-gather, step {at} of {ranks - 1}: {first}, which keeps it as it is.{end}"


def _frame(held: list[list[set]], sent: list[tuple[int, int]], ranks: int, names: list[str]) -> Canvas:
    canvas = Canvas(640, _TOP + ranks * (_CELL + 10) + 44)
    wide, gap = (92, 52) if ranks < 5 else (76, 36)
    left = _MARGIN + (_ROOM - ranks * wide - (ranks - 1) * gap) / 2
    canvas.text(left - 66, 24, "chunk", size=18)
    for chunk, name in enumerate(names):
        canvas.text(left - 66, _y(chunk) + _CELL / 2, name, size=22)
    for rank, row in enumerate(held):
        x = left + rank * (wide + gap)
        canvas.text(x + wide / 2, 24, f"rank {rank}", size=22, bold=True)
        for chunk, whose in enumerate(row):
            part = wide / ranks
            for place, owner in enumerate(sorted(whose, key=lambda owner: (owner - chunk) % ranks)):
                canvas.box(x + place * part, _y(chunk), part, _CELL, rank_colour(owner), str(owner), size=18, thick=0.8)
            canvas.box(x, _y(chunk), wide, _CELL, thick=4 if len(whose) == ranks else 1)
    for rank, chunk in sent:
        _arrow(canvas, left + rank * (wide + gap) + wide, chunk, left, gap, last=rank == ranks - 1, ranks=ranks)
    return canvas


def _arrow(canvas: Canvas, right: float, chunk: int, left: float, gap: float, last: bool, ranks: int) -> None:
    """From a rank's right edge to the next rank; from the last one below all of them back to the first."""
    middle, colour = _y(chunk) + _CELL / 2, DONE["communication"]
    if not last:
        canvas.arrow([(right + 4, middle), (right + gap - 4, middle)], colour, 4)
        return
    bottom = _y(ranks) + 22
    way = [(right + 4, middle), (right + 14, middle), (right + 14, bottom), (left - 46, bottom), (left - 46, middle)]
    canvas.arrow([*way, (left - 6, middle)], colour, 4)


def _y(chunk: int) -> float:
    return _TOP + chunk * (_CELL + 10)
