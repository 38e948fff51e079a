"""Lists the groups of a script's parallelisms by kind, and names each by letters."""

import itertools
import string
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pardemo.script.step.parallelism import Parallelism
from pardemo.script.step.shapes import Ranks


class GroupKind(NamedTuple):
    """Disjoint groups of one kind; ``letters`` names each, with letters that no other kind has."""

    name: str
    groups: tuple[Ranks, ...]
    letters: tuple[str, ...]

    def letter_of(self, rank: int) -> str:
        """Returns the letter of a rank's group; empty where it is in none."""
        letters = (letter for letter, ranks in zip(self.letters, self.groups, strict=True) if rank in ranks)
        return next(letters, "")


def groups_by_kind(parallelisms: Iterable[Parallelism]) -> list[GroupKind]:
    """Returns the groups of each parallelism; those whose ranks are closest together, as tensor parallel ones, first.

    HSDP has two kinds: its shards and its replicas. Where two groups of one kind have a rank in common (two models
    under DDP over different ranks), the second stands in a row of its own.
    """
    groups: dict[str, dict[Ranks, None]] = {}
    for parallelism in parallelisms:
        kind, replicas = parallelism.kind, parallelism.options.replicas
        groups.setdefault(f"{kind} shards" if replicas else kind, {})[parallelism.ranks] = None
        for ranks in replicas:
            groups.setdefault(f"{kind} replicas", {})[ranks] = None
    rows = [(name, row) for name, ranks in groups.items() for row in _disjoint_rows(sorted(ranks))]
    names = _letters()
    return [
        GroupKind(name, tuple(row), tuple(next(names) for _ in row))
        for name, row in sorted(rows, key=lambda item: max(item[1][0]) - min(item[1][0]))
    ]


def _disjoint_rows(groups: Iterable[Ranks]) -> list[list[Ranks]]:
    """Returns rows of groups that have no rank in common."""
    rows: list[list[Ranks]] = []
    for group in groups:
        row = next((row for row in rows if not any(set(group) & set(other) for other in row)), None)
        if row is None:
            rows.append(row := [])
        row.append(group)
    return rows


def _letters() -> Iterator[str]:
    """Yields ``a`` to ``z``, then ``aa``, ``ab`` …"""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))
