"""Who is in which group: every group of each parallelism, with a letter of its own."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pardemo.measure.running import Parallelism
from pardemo.tables import text_table

#: Ranks that stand beside one another in a terminal.
IN_A_LINE = 32


class Kind(NamedTuple):
    """The groups of one kind, none of which has a rank of another; ``letters`` names each, and no other kind's."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    letters: tuple[str, ...]

    def letter_of(self, rank: int) -> str:
        """The letter of the group that a rank is in; empty where it is in none."""
        of = (letter for letter, ranks in zip(self.letters, self.groups, strict=True) if rank in ranks)
        return next(of, "")


def kinds(parallelisms: Iterable[Parallelism]) -> list[Kind]:
    """The groups of each parallelism; those whose ranks lie closest together come first, as tensor parallel ones do.

    HSDP has two kinds: its shards and its replicas. Where two groups of one kind have a rank in common (two models
    under DDP over different ranks), the second stands in a row of its own.
    """
    found: dict[str, dict[tuple[int, ...], None]] = {}
    for one in parallelisms:
        replicas = one.options.get("replicas", ())
        found.setdefault(f"{one.kind} shards" if replicas else one.kind, {})[one.ranks] = None
        for ranks in replicas:
            found.setdefault(f"{one.kind} replicas", {})[ranks] = None
    rows = [(name, row) for name, groups in found.items() for row in _apart(sorted(groups))]
    names = _letters()
    return [
        Kind(name, tuple(row), tuple(next(names) for _ in row))
        for name, row in sorted(rows, key=lambda item: max(item[1][0]) - min(item[1][0]))
    ]


def to_be_drawn(some: Sequence[Kind]) -> bool:
    """Whether a drawing says more than a line: there are several groups."""
    return sum(len(kind.groups) for kind in some) > 1


def as_text(some: Sequence[Kind], ranks: int, hosts: int = 1) -> str:
    """A column for each rank, a row for each kind, the letters of the groups as cells; hosts are parted by a line."""
    beside = ranks // hosts
    lines = []
    for begin in range(0, ranks, IN_A_LINE):
        here = range(begin, min(begin + IN_A_LINE, ranks))
        rows = [["", "rank", *map(str, here)]]
        rows += [["", kind.name, *(kind.letter_of(rank) or "·" for rank in here)] for kind in some]
        for row in rows:
            row[2:] = [
                f"│ {cell}" if rank and rank % beside == 0 else cell for rank, cell in zip(here, row[2:], strict=True)
            ]
        lines.append(text_table(rows))
    return "\n".join(lines)


def _apart(groups: Iterable[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Rows of groups that have no rank in common."""
    rows: list[list[tuple[int, ...]]] = []
    for group in groups:
        row = next((row for row in rows if not any(set(group) & set(other) for other in row)), None)
        if row is None:
            rows.append(row := [])
        row.append(group)
    return rows


def _letters() -> Iterator[str]:
    """``a`` to ``z``, then ``aa``, ``ab`` …"""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    yield from alphabet
    for first in alphabet:
        yield from (first + second for second in alphabet)
