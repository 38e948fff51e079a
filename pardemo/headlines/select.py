"""A seeded choice of n rows out of any number, without duplicates, in memory for n rows and no more."""

import hashlib
import heapq
from collections.abc import Mapping

from pardemo.headlines.rows import as_line, key_of


class Selection:
    """Keeps the ``size`` rows whose inputs have the smallest keyed hashes: those a seed chooses, whatever the order.

    Equal inputs (see :func:`pardemo.headlines.rows.key_of`) have equal hashes, so that of a duplicate only the first is
    kept, also where the first has been pushed out since. Memory: ``size`` · (the row's own bytes + about 300 B),
    however many rows are offered. The chosen rows in the order of their hashes are a shuffle, and the first of them
    are the choice for any smaller size.
    """

    def __init__(self, size: int, seed: int):
        self._size = size
        self._key = str(seed).encode()
        self._heap: list[tuple[int, bytes]] = []  # the largest hash on top: (−hash, row)
        self._held: set[int] = set()
        self.duplicates = 0

    def __len__(self) -> int:
        return len(self._heap)

    def hash_of(self, text: str) -> int:
        """128 bits that depend on the seed and on the input's text alone."""
        return int.from_bytes(hashlib.blake2b(key_of(text), digest_size=16, key=self._key).digest())

    def offer(self, row: Mapping[str, str]) -> None:
        """Takes or leaves a row; one that is kept is held as its line of JSON."""
        value = self.hash_of(row["input"])
        if value in self._held:
            self.duplicates += 1
        elif len(self._heap) < self._size:
            heapq.heappush(self._heap, (-value, as_line(row)))
            self._held.add(value)
        elif value < -self._heap[0][0]:
            gone, _ = heapq.heapreplace(self._heap, (-value, as_line(row)))
            self._held.remove(-gone)
            self._held.add(value)

    def rows(self) -> list[bytes]:
        """The chosen rows, as lines, in the order of their hashes."""
        return [row for _, row in sorted(self._heap, reverse=True)]
