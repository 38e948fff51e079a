"""Replays torch's caching allocator on CUDA: what it reserves beyond what tensors ask for.

Its rules (torch/c10 CUDACachingAllocator): sizes are rounded up to 512 B; up to 1 MiB come out of segments of 2 MiB, up
to 10 MiB out of segments of 20 MiB, larger ones have segments of their own, rounded up to 2 MiB; the smallest free
block that is large enough is taken and cut; neighbours that are free become one. Segments are kept until CUDA has no
room for another: then those that are wholly free are given back first.

The step alone is replayed. What building a model leaves free, whole segments of tensors that have gone, the allocator
gives back to CUDA before it says "out of memory", and DeepSpeed empties its cache itself; so what is alive when the
step begins is laid out afresh, one tensor after the other.
"""

import bisect
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

MIB = 1 << 20
ROUND, SMALL, SMALL_SEGMENT, MIDDLE, MIDDLE_SEGMENT, LARGE_ROUND = (
    512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB,
)  # fmt: skip
Segments = tuple[tuple[int, tuple[tuple[Hashable, int, int], ...]], ...]


class _Pool:
    """Free blocks (size, address) of one pool; addresses are unique over segments, which never touch."""

    def __init__(self, small: bool):
        self.least = ROUND if small else SMALL + 1  # that is cut off a block
        self.free: list[tuple[int, int]] = []
        self.ends: dict[int, int] = {}  # of free blocks: address -> size
        self.starts: dict[int, int] = {}  # of free blocks: end -> address

    def add(self, address: int, size: int) -> None:
        if (before := self.starts.get(address)) is not None:
            self.drop(before)
            address, size = before, size + address - before
        if (more := self.ends.get(address + size)) is not None:
            self.drop(address + size)
            size += more
        self.ends[address] = size
        self.starts[address + size] = address
        bisect.insort(self.free, (size, address))

    def take(self, size: int) -> tuple[int, int] | None:
        free = self.free
        index = bisect.bisect_left(free, (size, 0))
        if index == len(free):
            return None
        length, address = free[index]
        del free[index], self.ends[address], self.starts[address + length]
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
        self._blocks: dict[Hashable, tuple[bool, int, int]] = {}
        self._end = 0

    def allocate(self, storage: Hashable, nbytes: int) -> None:
        size = -(-nbytes // ROUND) * ROUND
        small = size <= SMALL
        block = self._pools[small].take(size)
        if block is None:
            self._extend(self._pools[small], _segment(size))
            block = self._pools[small].take(size)
        assert block is not None, "a new segment has room"
        self._blocks[storage] = (small, *block)

    def free(self, storage: Hashable) -> None:
        small, address, size = self._blocks.pop(storage)
        self._pools[small].add(address, size)

    def layout(self) -> Segments:
        """Lists the segments in the order that they were made: size, and (storage, offset, size) of each block; MiB."""
        blocks = [(storage, at, size) for storage, (_, at, size) in self._blocks.items()]
        return tuple(
            (length // MIB, tuple((storage, (at - begin) // MIB, size // MIB) for storage, at, size in blocks
                                  if begin <= at < begin + length))
            for begin, length in sorted(self._segments.items())
        )  # fmt: skip

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
    """Returns the most bytes of segments during the step: what ``torch.cuda.max_memory_reserved`` would say.

    Args:
        resident: (number, bytes) of each storage that is alive when the step begins, in the order that they were made.
        changes: (number, bytes) of each storage that is made in the step, or with its bytes negative goes.
        room: bytes that CUDA has; more than that is returned where they are not enough.
    """
    replay, alive = Allocator(room), set()
    for storage, nbytes in (*resident, *changes):
        if nbytes > 0:
            replay.allocate(storage, math.ceil(nbytes))
            alive.add(storage)
        elif storage in alive:
            replay.free(storage)
            alive.remove(storage)
    return replay.most


PAGE = 2  # MiB
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # its name since torch 2.9, and before
Change = tuple[Hashable, int]


@dataclass(frozen=True)
class Replay:
    """The outcome of replaying changes of memory through the allocator. Sizes are MiB.

    Attributes:
        failed: the storage that found no room, None if all did.
        wanted, taken, reserved: its size, and that of all tensors and segments when it stopped.
        segments: size of each, and (storage, offset, size) of each block that is taken in it.
        real: whether torch's own allocator was asked.
    """

    failed: Hashable
    wanted: int
    taken: int
    reserved: int
    segments: Segments
    real: bool

    @property
    def largest(self) -> int:
        """The largest hole in a segment."""
        most = 0
        for size, taken in self.segments:
            end = 0
            for _, offset, length in sorted(taken, key=lambda block: block[1]):
                most, end = max(most, offset - end), offset + length
            most = max(most, size - end)
        return most


def replay(changes: Iterable[Change], room: int, expandable: bool = False) -> Replay:
    """Allocates what ``changes`` name, in MiB, and gives it back where that is negative, in ``room`` MiB.

    Raises:
        RuntimeError: a GPU is there, and its allocator could not be asked.
    """
    import torch

    changes = list(changes)
    if torch.cuda.is_available():
        return _on_gpu(changes, room, expandable)
    return _in_pages(changes, room) if expandable else by_the_rules(changes, room)


def by_the_rules(changes: Sequence[Change], room: int) -> Replay:
    """Returns what the model of the allocator's rules says, without torch."""
    memory, taken = Allocator(room * MIB), 0
    for storage, size in changes:
        if size < 0:
            memory.free(storage)
        else:
            reserved, segments = memory.reserved // MIB, memory.layout()
            memory.allocate(storage, size * MIB)
            if memory.reserved > room * MIB:  # the model goes on where CUDA would not
                return Replay(storage, size, taken, reserved, segments, False)
        taken += size
    return Replay(None, 0, taken, memory.reserved // MIB, memory.layout(), False)


def _in_pages(changes: Sequence[Change], room: int) -> Replay:
    """Expandable segments: a single one, of pages that need not lie side by side."""
    pages_of: dict[Hashable, int] = {}
    most, failed, wanted = 0, None, 0
    for storage, size in changes:
        if size < 0:
            del pages_of[storage]
            continue
        pages = math.ceil(size / PAGE) * PAGE
        if sum(pages_of.values()) + pages > room:
            failed, wanted = storage, size
            break
        pages_of[storage] = pages
        most = max(most, sum(pages_of.values()))
    ends = itertools.accumulate(pages_of.values())
    blocks = tuple(
        (storage, end - length, length) for (storage, length), end in zip(pages_of.items(), ends, strict=True)
    )
    return Replay(failed, wanted, sum(pages_of.values()), most, ((most, blocks),), False)


def _on_gpu(changes: Sequence[Change], room: int, expandable: bool) -> Replay:
    question = json.dumps({"changes": [[str(storage), size] for storage, size in changes], "room": room})
    environment = os.environ | dict.fromkeys(SETTINGS, f"expandable_segments:{expandable}")
    ended = subprocess.run([sys.executable, "-m", __name__], input=question, capture_output=True, text=True,
                           env=environment, timeout=120)  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"torch's allocator could not be asked: {ended.stderr.strip().splitlines()[-1:]}")
    answer = json.loads(ended.stdout)
    segments = tuple((size, tuple(tuple(block) for block in blocks)) for size, blocks in answer.pop("segments"))
    return Replay(**answer, segments=segments, real=True)


def _ask_torch(changes: Sequence[Change], room: int) -> dict:
    """Runs in a process of its own on a GPU, with nothing else in its memory."""
    import torch

    torch.cuda.set_per_process_memory_fraction(room * MIB / torch.cuda.get_device_properties(0).total_memory)
    tensors: dict[Hashable, torch.Tensor] = {}
    failed, wanted = None, 0
    for storage, size in changes:
        if size < 0:
            del tensors[storage]
            continue
        try:
            tensors[storage] = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            failed, wanted = storage, size
            break
    storage_at = {tensor.data_ptr(): storage for storage, tensor in tensors.items()}
    segments = []
    for segment in torch.cuda.memory_snapshot():
        at, blocks = segment["address"], []
        for block in segment["blocks"]:
            if at in storage_at:
                blocks.append((storage_at[at], (at - segment["address"]) // MIB, block["size"] // MIB))
            at += block["size"]
        segments.append((segment["total_size"] // MIB, blocks))
    return {"failed": failed, "wanted": wanted, "taken": torch.cuda.memory_allocated() // MIB,
            "reserved": torch.cuda.memory_reserved() // MIB, "segments": segments}  # fmt: skip


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(_ask_torch(asked["changes"], asked["room"])))
