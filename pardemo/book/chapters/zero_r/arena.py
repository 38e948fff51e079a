"""A memory in which holes come to be, small enough to follow by hand (M_D, Rajbhandari et al. 2020, 6.3).

torch's own allocator is in :mod:`pardemo.planner.dry_run.allocator`.
"""


class OutOfMemory(MemoryError):
    """No free block is large enough. ``free`` is what all of them hold together, ``largest`` the largest one's size."""

    def __init__(self, wanted: int, free: int, largest: int):
        super().__init__(f"{wanted} wanted; {free} are free, but no block of more than {largest}")
        self.wanted, self.free, self.largest = wanted, free, largest


class Arena:
    """Memory of ``size`` units, given out first-fit in the order of addresses.

    >>> arena = Arena(10)
    >>> a, b = arena.take(4), arena.take(4)
    >>> arena.give_back(a)
    >>> arena.free, arena.largest
    (6, 4)
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"memory has a size of at least 1, not {size}")
        self.size = size
        self.taken: dict[int, int] = {}  # address -> size

    @property
    def free(self) -> int:
        return self.size - sum(self.taken.values())

    @property
    def largest(self) -> int:
        """The largest free block."""
        return max((end - begin for begin, end in self._gaps()), default=0)

    def take(self, size: int) -> int:
        """The address of a new block.

        Raises:
            OutOfMemory: no free block is large enough. ValueError: a size below 1.
        """
        if size < 1:
            raise ValueError(f"a block has a size of at least 1, not {size}")
        for begin, end in self._gaps():
            if end - begin >= size:
                self.taken[begin] = size
                return begin
        raise OutOfMemory(size, self.free, self.largest)

    def give_back(self, address: int) -> None:
        """Frees the block at ``address``; KeyError when there is none."""
        del self.taken[address]

    def _gaps(self) -> list[tuple[int, int]]:
        gaps, at = [], 0
        for begin, size in sorted(self.taken.items()):
            if begin > at:
                gaps.append((at, begin))
            at = begin + size
        if at < self.size:
            gaps.append((at, self.size))
        return gaps
