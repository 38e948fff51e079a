"""Allocations and releases as torch's caching allocator takes them: where memory ends in holes, and where it does not.

On a GPU the allocator itself is asked, in a process of its own (its settings are read once, when CUDA starts);
elsewhere :mod:`pardemo.planner.allocator` follows its rules. ``expandable_segments`` (CUDA's virtual memory: a segment
is a range of addresses, to which pages of 2 MiB are mapped as they are needed) has no rules there: then only pages are
counted, as if each could be given to whoever wants it.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from pardemo.planner.allocator import Allocator

MIB = 1 << 20
PAGE = 2  # MiB
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # its name since torch 2.9, and before
Change = tuple[Hashable, int]


@dataclass(frozen=True)
class Replay:
    """What became of the changes. Sizes are MiB.

    Attributes: ``failed``: who found no room, None if all did; ``wanted``, ``taken`` (by tensors) and ``reserved`` (by
    segments) when it stopped; ``segments``: size of each and (who, place, size) of what is taken in it; ``real``:
    whether torch's own allocator was asked.
    """

    failed: Hashable
    wanted: int
    taken: int
    reserved: int
    segments: tuple[tuple[int, tuple[tuple[Hashable, int, int], ...]], ...]
    real: bool

    @property
    def largest(self) -> int:
        """The largest hole in a segment."""
        return max((hole for size, taken in self.segments for hole in _holes(size, taken)), default=0)


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
    """What the model of the allocator's rules says, without torch."""
    memory, taken, failed, wanted = Allocator(room * MIB), 0, None, 0
    for who, size in changes:
        if size < 0:
            memory.free(who)
        else:
            before = memory.layout(), memory.reserved
            memory.allocate(who, size * MIB)
            if memory.reserved > room * MIB:  # the model goes on where CUDA would not
                failed, wanted = who, size
                return Replay(failed, wanted, taken, before[1] // MIB, _in_mib(before[0]), False)
        taken += size
    return Replay(None, 0, taken, memory.reserved // MIB, _in_mib(memory.layout()), False)


def _in_mib(layout) -> tuple:
    return tuple(
        (size // MIB, tuple((who, at // MIB, length // MIB) for who, (at, length) in taken.items()))
        for size, taken in layout
    )


def _in_pages(changes: Sequence[Change], room: int) -> Replay:
    pages_of, most = {}, 0
    for who, size in changes:
        if size < 0:
            del pages_of[who]
            continue
        pages = math.ceil(size / PAGE) * PAGE
        if sum(pages_of.values()) + pages > room:
            return Replay(who, size, sum(pages_of.values()), most, _one_segment(pages_of, most), False)
        pages_of[who] = pages
        most = max(most, sum(pages_of.values()))
    return Replay(None, 0, sum(pages_of.values()), most, _one_segment(pages_of, most), False)


def _one_segment(pages_of: dict, size: int) -> tuple:
    places, at = [], 0
    for who, length in pages_of.items():
        places.append((who, at, length))
        at += length
    return ((size, tuple(places)),)


def _holes(size: int, taken: Iterable[tuple[Hashable, int, int]]) -> list[int]:
    holes, at = [], 0
    for _, place, length in sorted(taken, key=lambda block: block[1]):
        holes.append(place - at)
        at = place + length
    return [*holes, size - at]


def _on_gpu(changes: Sequence[Change], room: int, expandable: bool) -> Replay:
    question = json.dumps({"changes": [[str(who), size] for who, size in changes], "room": room})
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
    tensors, failed, wanted = {}, None, 0
    for who, size in changes:
        if size < 0:
            del tensors[who]
            continue
        try:
            tensors[who] = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            failed, wanted = who, size
            break
    places = {tensor.data_ptr(): who for who, tensor in tensors.items()}
    segments = []
    for segment in torch.cuda.memory_snapshot():
        at, blocks = segment["address"], []
        for block in segment["blocks"]:
            if at in places:
                blocks.append((places[at], (at - segment["address"]) // MIB, block["size"] // MIB))
            at += block["size"]
        segments.append((segment["total_size"] // MIB, blocks))
    return {"failed": failed, "wanted": wanted, "taken": torch.cuda.memory_allocated() // MIB,
            "reserved": torch.cuda.memory_reserved() // MIB, "segments": segments}  # fmt: skip


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(_ask_torch(asked["changes"], asked["room"])))
