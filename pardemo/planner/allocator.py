"""Torch's caching allocator on CUDA, replayed: what it reserves beyond what tensors ask for.

Its rules (torch/c10 CUDACachingAllocator): sizes are rounded up to 512 B; up to 1 MiB come out of segments of 2 MiB, up
to 10 MiB out of segments of 20 MiB, larger ones have segments of their own, rounded up to 2 MiB; the smallest free
block that is large enough is taken and cut; neighbours that are free become one. Segments are kept.
"""

import bisect

from pardemo.planner.footprint import Footprint

_MIB = 1 << 20
ROUND, SMALL, SMALL_SEGMENT, MIDDLE, MIDDLE_SEGMENT, LARGE_ROUND = (
    512, _MIB, 2 * _MIB, 10 * _MIB, 20 * _MIB, 2 * _MIB,
)  # fmt: skip


class _Pool:
    """Free blocks (size, address) of one pool; addresses are unique over segments, which never touch."""

    def __init__(self, small: bool):
        self.small = small
        self.free: list[tuple[int, int]] = []
        self.ends: dict[int, int] = {}  # of free blocks: address -> size
        self.starts: dict[int, int] = {}  # of free blocks: end -> address

    def add(self, address: int, size: int) -> None:
        before = self.starts.pop(address, None)
        if before is not None:
            self._drop(before)
            address, size = before, size + address - before
        after = address + size
        if after in self.ends:
            more = self.ends[after]
            self.starts.pop(after + more, None)
            self._drop(after)
            size += more
        self.ends[address] = size
        self.starts[address + size] = address
        bisect.insort(self.free, (size, address))

    def take(self, size: int) -> tuple[int, int] | None:
        place = bisect.bisect_left(self.free, (size, 0))
        if place == len(self.free):
            return None
        found, address = self.free[place]
        self.starts.pop(address + found)
        self._drop(address)
        rest = found - size
        if rest >= (ROUND if self.small else SMALL + 1):
            self.add(address + size, rest)
            return address, size
        return address, found

    def _drop(self, address: int) -> None:
        size = self.ends.pop(address)
        del self.free[bisect.bisect_left(self.free, (size, address))]


def reserved_bytes(found: Footprint) -> int:
    """Bytes of the segments at the end of the step: what ``torch.cuda.max_memory_reserved`` would say."""
    pools = {True: _Pool(True), False: _Pool(False)}
    blocks: dict[int, tuple[bool, int, int]] = {}
    reserved, address = 0, 0
    for who, change in found.changes.tolist():
        if change > 0:
            size = -(-change // ROUND) * ROUND
            small = size <= SMALL
            block = pools[small].take(size)
            if block is None:
                segment = (
                    SMALL_SEGMENT
                    if small
                    else MIDDLE_SEGMENT
                    if size < MIDDLE
                    else -(-size // LARGE_ROUND) * LARGE_ROUND
                )
                pools[small].add(address, segment)
                address += segment + ROUND  # segments do not touch
                reserved += segment
                block = pools[small].take(size)
            blocks[who] = (small, *block)
        elif who in blocks:
            small, place, size = blocks.pop(who)
            pools[small].add(place, size)
    return reserved
