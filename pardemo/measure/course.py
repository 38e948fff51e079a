"""A step's memory from change to change: what was held of each kind, when most, and what ran."""

from collections.abc import Sequence
from typing import NamedTuple

from pardemo.meters.snapshot import Block

#: A picture has no room for more.
COLUMNS = 300


class Course(NamedTuple):
    """A step in columns of equally many changes; each is told by its fullest moment.

    Args:
        columns: bytes by kind. peak_bytes: the largest sum. peak_column: where it is.
        phases: what ran, from which column to which, in parts of columns.
    """

    columns: list[dict[str, int]]
    peak_bytes: int
    peak_column: int
    phases: list[tuple[str, float, float]]


def course(blocks: Sequence[Block], columns: int = COLUMNS) -> Course:
    """Of the blocks of a step, as each came and went."""
    changes: list[tuple[int, str, int]] = []
    for block in blocks:
        changes.append((block.born, block.kind, block.bytes))
        if block.died is not None:
            changes.append((block.died, block.kind, -block.bytes))
    changes.sort(key=lambda change: change[0])
    each = (1 + max((at for at, _, _ in changes), default=0)) / columns
    live: dict[str, int] = {}
    made: list[dict[str, int]] = []
    most = peak = peak_column = 0
    for at, kind, nbytes in changes:
        column = int(at / each)
        while len(made) <= column:  # what is held stays held where nothing changes
            made.append(dict(live))
            most = sum(live.values())
        live[kind] = live.get(kind, 0) + nbytes
        if (now := sum(live.values())) >= most:
            made[column], most = dict(live), now
        if now > peak:
            peak, peak_column = now, column
    return Course(made, peak, peak_column, _phases(blocks, each))


def _phases(blocks: Sequence[Block], each: float) -> list[tuple[str, float, float]]:
    """Stretches of blocks that came in one phase, as columns; what was there before the step came in none of them."""
    joined: list[tuple[str, int, int]] = []
    for block in sorted((block for block in blocks if block.born), key=lambda block: block.born):
        if joined and joined[-1][0] == block.phase:
            joined[-1] = block.phase, joined[-1][1], block.born
        else:
            joined.append((block.phase, block.born, block.born))
    return [(phase, begin / each, (end + 1) / each) for phase, begin, end in joined]
