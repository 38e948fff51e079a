"""Torch's caching allocator on CUDA, replayed: what it reserves beyond what tensors ask for.

Its rules (torch/c10 CUDACachingAllocator): sizes are rounded up to 512 B; up to 1 MiB come out of segments of 2 MiB, up
to 10 MiB out of segments of 20 MiB, larger ones have segments of their own, rounded up to 2 MiB; the smallest free
block that is large enough is taken and cut; neighbours that are free become one. Segments are kept until CUDA has no
room for another: then those that are wholly free are given back first.

The step alone is replayed. What building a model leaves free, whole segments of tensors that have gone, the allocator
gives back to CUDA before it says "out of memory", and DeepSpeed empties its cache itself; so what is alive when the
step begins is laid out afresh, one tensor after the other.
"""

import bisect
import math
from collections.abc import Iterable

_MIB = 1 << 20
ROUND, SMALL, SMALL_SEGMENT, MIDDLE, MIDDLE_SEGMENT, LARGE_ROUND = (
    512, _MIB, 2 * _MIB, 10 * _MIB, 20 * _MIB, 2 * _MIB,
)  # fmt: skip


class _Pool:
    """Free blocks (size, address) of one pool; addresses are unique over segments, which never touch."""

    def __init__(self, small: bool):
        self.least = ROUND if small else SMALL + 1  # that is cut off a block
        self.free: list[tuple[int, int]] = []
        self.ends: dict[int, int] = {}  # of free blocks: address -> size
        self.starts: dict[int, int] = {}  # of free blocks: end -> address

    def add(self, address: int, size: int) -> None:
        before = self.starts.get(address)
        if before is not None:
            self.drop(before)
            address, size = before, size + address - before
        after = address + size
        if after in self.ends:
            more = self.ends[after]
            self.drop(after)
            size += more
        self.ends[address] = size
        self.starts[address + size] = address
        bisect.insort(self.free, (size, address))

    def take(self, size: int) -> tuple[int, int] | None:
        free = self.free
        place = bisect.bisect_left(free, (size, 0))
        if place == len(free):
            return None
        length, address = free[place]
        del free[place], self.ends[address], self.starts[address + length]
        rest = length - size
        if rest < self.least:
            return address, length
        begin = address + size  # its other neighbour is taken, or would have become one with it
        self.ends[begin], self.starts[begin + rest] = rest, begin
        bisect.insort(free, (rest, begin))
        return address, size

    def drop(self, address: int) -> None:
        size = self.ends.pop(address)
        self.starts.pop(address + size)
        del self.free[bisect.bisect_left(self.free, (size, address))]


class Allocator:
    """The allocator's two pools; ``reserved`` is the bytes of all segments, ``most`` the largest it has been."""

    def __init__(self, room: float = math.inf):
        self.room = room
        self.reserved = self.most = 0
        self._segments: dict[int, int] = {}  # address -> size
        self._pools = {True: _Pool(True), False: _Pool(False)}
        self._blocks: dict[int, tuple[bool, int, int]] = {}
        self._end = 0

    def allocate(self, who: int, nbytes: int) -> None:
        size = -(-nbytes // ROUND) * ROUND
        small = size <= SMALL
        block = self._pools[small].take(size)
        if block is None:
            self._extend(self._pools[small], _segment(size))
            block = self._pools[small].take(size)
        assert block is not None, "a new segment has room"
        self._blocks[who] = (small, *block)

    def free(self, who: int) -> None:
        small, place, size = self._blocks.pop(who)
        self._pools[small].add(place, size)

    def layout(self) -> list[tuple[int, dict[int, tuple[int, int]]]]:
        """Each segment in the order that they were made: its size, and who -> (place in it, size) of what is taken."""
        blocks = {who: (place, size) for who, (_, place, size) in self._blocks.items()}
        return [
            (length, {who: (at - begin, size) for who, (at, size) in blocks.items() if begin <= at < begin + length})
            for begin, length in sorted(self._segments.items())
        ]

    def _extend(self, pool: _Pool, segment: int) -> None:
        if self.reserved + segment > self.room:
            self._give_back()
        pool.add(self._end, segment)
        self._segments[self._end] = segment
        self._end += segment + ROUND  # segments do not touch
        self.reserved += segment
        self.most = max(self.most, self.reserved)

    def _give_back(self) -> None:
        for pool in self._pools.values():
            for address, size in list(pool.ends.items()):
                if self._segments.get(address) == size:
                    pool.drop(address)
                    self.reserved -= self._segments.pop(address)


def _segment(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return MIDDLE_SEGMENT if size < MIDDLE else -(-size // LARGE_ROUND) * LARGE_ROUND


def reserved_bytes(
    resident: Iterable[tuple[int, float]], changes: Iterable[tuple[int, float]], room: float = math.inf
) -> int:
    """The most bytes of segments during the step: what ``torch.cuda.max_memory_reserved`` would say.

    Args:
        resident: (number, bytes) of each storage that is alive when the step begins, in the order that they were made.
        changes: (number, bytes) of each storage that is made in the step, or with its bytes negative goes.
        room: bytes that CUDA has; more than that is returned where they are not enough.
    """
    replay, alive = Allocator(room), set()
    for who, nbytes in (*resident, *changes):
        if nbytes > 0:
            replay.allocate(who, math.ceil(nbytes))
            alive.add(who)
        elif who in alive:
            replay.free(who)
            alive.remove(who)
    return replay.most
