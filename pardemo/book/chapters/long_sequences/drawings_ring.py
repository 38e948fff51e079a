"""Ring attention step by step: which blocks of a causal attention each rank computes, in two orders of the tokens."""

from pardemo.draw.canvas import Canvas
from pardemo.draw.palette import DONE, INK, RANKS
from pardemo.draw.player import Player

Pieces = tuple[int, int]


def in_order(rank: int, ranks: int) -> Pieces:
    """The two pieces of a rank, of 2N, where the sequence is cut in its order."""
    return 2 * rank, 2 * rank + 1


def in_zigzag(rank: int, ranks: int) -> Pieces:
    """The two pieces of a rank in the zigzag: one from the front and one from the back."""
    return rank, 2 * ranks - 1 - rank


ORDERS = {"plain order": in_order, "zigzag": in_zigzag}


def blocks_of_step(order: str, rank: int, ranks: int, step: int) -> list[tuple[int, int]]:
    """(piece of queries, piece of keys) that a rank computes in a step: those of the rank ``step`` before it."""
    pieces = ORDERS[order]
    source = (rank - step) % ranks
    return [(a, b) for a in pieces(rank, ranks) for b in pieces(source, ranks) if b <= a]


def ring_of_keys(ranks: int = 4) -> Player:
    """Squares of queries (down) and keys (across), in both orders: a step fills the blocks that it computes."""
    return Player(
        [_frame(ranks, step) for step in range(ranks)],
        f"ring attention on {ranks} ranks, step by step, in plain order and in zigzag",
        start=min(1, ranks - 1),
        first=0,
    )


def _frame(ranks: int, step: int) -> tuple[Canvas, str]:
    canvas = Canvas(640, 432)
    side = 256
    most, sayings = [], []
    for x, order in zip((48, 370), ORDERS, strict=True):
        canvas.text(x + side / 2, 16, order, bold=True)
        counts = _square(canvas, x, 36, side, order, ranks, step)
        line = "  ".join(str(count) for count in counts)
        canvas.text(x + side / 2, 36 + side + 26, f"blocks by rank: {line}", size=18)
        idle = [str(rank) for rank, count in enumerate(counts) if not count]
        if idle:
            width = side
            label = f"idle: {'rank' if len(idle) == 1 else 'ranks'} {', '.join(idle)}"
            canvas.box(x, 36 + side + 46, width, 32, DONE["idle"], label, size=18)
        most.append(max(counts))
        sayings.append(f"in {order} the ranks compute {', '.join(map(str, counts))} blocks")
    canvas.lines(
        12, 396, ("down: queries, with the rank that has them; across: keys", "thick: blocks of this step"),
        anchor="start",
    )  # fmt: skip
    where = "its own keys" if step == 0 else f"the keys of the rank that is {step} before it"
    caption = (
        f"Step {step}: each rank has {where}; {', '.join(sayings)}. The step lasts as long as its busiest rank: "
        f"{most[0]} blocks, and {most[1]}."
    )
    return canvas, caption


def _square(canvas: Canvas, x: float, y: float, side: float, order: str, ranks: int, step: int) -> list[int]:
    cell = side / (2 * ranks)
    canvas.box(x, y, side, side, thick=1, dashed=True)
    pieces = ORDERS[order]
    owner = {piece: rank for rank in range(ranks) for piece in pieces(rank, ranks)}
    canvas.texts([(x - 16, y + (piece + 0.5) * cell, str(owner[piece])) for piece in range(2 * ranks)])
    counts = []
    now: list[tuple[int, int]] = []
    for rank in range(ranks):
        done = [block for earlier in range(step) for block in blocks_of_step(order, rank, ranks, earlier)]
        here = blocks_of_step(order, rank, ranks, step)
        canvas.boxes([_place(x, y, cell, block) for block in done + here], RANKS[rank], thick=0.8)
        counts.append(len(here))
        now += here
    for block in now:
        left, top, *_ = _place(x, y, cell, block)
        canvas.box(left + 3, top + 3, cell - 6, cell - 6, thick=3, border=INK)
    return counts


def _place(x: float, y: float, cell: float, block: tuple[int, int]) -> tuple[float, float, float, float]:
    queries, keys = block
    return x + keys * cell, y + queries * cell, cell, cell
