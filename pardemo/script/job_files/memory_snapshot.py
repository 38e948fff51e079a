"""Reads which blocks were allocated at the peak of a memory snapshot of torch.

``torch.cuda.memory._dump_snapshot`` writes it, and ``pardemo measure --out`` in its form
(:mod:`pardemo.meters.snapshot`), with the kind of each tensor for its category.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pardemo.script.job_files.records import MemoryRecord

#: Frames of a block that are kept, the innermost first: the script's line may be many of torch's frames further out.
_FRAMES = 40
#: A category of torch's viewer for blocks whose kind it does not know.
_UNKNOWN = "unknown"


class _Block(NamedTuple):
    """A block's bytes, its kind where the file has it, and the frames that allocated it, as ``train.py:88``."""

    nbytes: int
    kind: str
    frames: tuple[str, ...]


def memory_of(rank: int, taken: Mapping[str, Any]) -> MemoryRecord:
    """Finds the peak of the device that has most events in a snapshot, and the blocks that are allocated then.

    Raises:
        ValueError: it has entries that torch does not write.
    """
    try:
        events: list[Any] = max(taken["device_traces"], key=len, default=[])
        alive, changes = _alive_before(events, taken["segments"]), list(_changes(events))
        begin, now = dict(alive), sum(block.nbytes for block in alive.values())
        peak, fullest = now, 0  # after so many changes
        for number, (address, block) in enumerate(changes, 1):
            before = alive.get(address)
            now += (block.nbytes if block else 0) - (before.nbytes if before else 0)
            _put(alive, address, block)
            if now > peak:
                peak, fullest = now, number
        alive = begin
        for address, block in changes[:fullest]:
            _put(alive, address, block)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"an entry that torch's memory snapshot does not have: {error!r}") from None
    record = MemoryRecord(rank, peak, Counter(), Counter())
    for block in alive.values():
        if block.kind:
            record.by_kind[block.kind] += block.nbytes
        else:
            record.by_frames[block.frames] += block.nbytes
    return record


def _changes(events: Iterable[Mapping[str, Any]]) -> Iterable[tuple[int, _Block | None]]:
    """Yields the address and the block of each allocation, and the address and None of each release."""
    for event in events:
        if event["action"] == "alloc":
            yield event["addr"], _block(event)
        elif event["action"] == "free_completed":
            yield event["addr"], None


def _alive_before(events: Iterable[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]]) -> dict[int, _Block]:
    """Finds the blocks from before the first event: those released, or there at the end, but never allocated."""
    alive, allocated = {}, set()
    for event in events:
        if event["action"] == "alloc":
            allocated.add(event["addr"])
        elif event["action"] == "free_completed" and event["addr"] not in allocated:
            alive[event["addr"]] = _Block(int(event["size"]), "", ())  # who released it did not make it
            allocated.add(event["addr"])
    for segment in segments:
        for block in segment["blocks"]:
            address = block.get("address")
            if block["state"].startswith("active") and address not in allocated:
                alive[address] = _block(block)
    return alive


def _block(taken: Mapping[str, Any]) -> _Block:
    kind = str(taken.get("category") or "")
    frames = [] if kind and kind != _UNKNOWN else list(taken.get("frames") or [])[:_FRAMES]
    lines = [f"{os.path.basename(str(frame['filename']))}:{int(frame['line'])}" for frame in frames]
    return _Block(int(taken["size"]), "" if kind == _UNKNOWN else kind, tuple(lines))


def _put(alive: dict[int, _Block], address: int, block: _Block | None) -> None:
    if block is None:
        alive.pop(address, None)
    else:
        alive[address] = block
