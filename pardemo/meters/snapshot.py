"""Writes a rank's memory in one step as a memory snapshot of torch (https://docs.pytorch.org/memory_viz)."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pardemo import project


class Block(NamedTuple):
    """A storage of the followed step: its bytes, what it is, who made it, and when it came and went.

    Args:
        line: ``train.py:88``, or, where no line is known, what made it.
        born, died: numbers of changes, in their order; 0 for what was there before, None for what outlives the step.
        phase: what ran when it came: ``forward``, ``backward``, ``step``, ``evaluation`` or ``between``.
    """

    bytes: int
    kind: str
    line: str
    module: str
    born: int
    died: int | None
    phase: str = "between"


def snapshot(blocks: Sequence[Block]) -> dict[str, Any]:
    """Describes these blocks as ``torch.cuda.memory._dump_snapshot`` does, each at an address of its own.

    A block's only frame is the script's line; its function's name says the module and the kind. The kind is its
    category, too, by which the viewer colours it. The viewer stops where no event has the category ``unknown``; so the
    last one, at which the snapshot is taken, has it.
    """
    events: list[tuple[int, dict[str, Any]]] = []
    frames: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    address = 0x7F0000000000
    for block in blocks:
        made = block.line, block.module, block.kind
        if made not in frames:
            frames[made] = [_frame(*made)]
        event = {"addr": address, "size": block.bytes, "stream": 0, "frames": frames[made], "category": block.kind}
        events.append((block.born, event | {"action": "alloc", "time_us": block.born}))
        if block.died is not None:
            events.append((block.died, event | {"action": "free_completed", "time_us": block.died}))
        address += -(-block.bytes // 512) * 512 or 512
    events.sort(key=lambda event: event[0])
    last = events[-1][0] if events else 0
    taken = {
        "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown", "action": "snapshot", "time_us": last
    }  # fmt: skip
    return {
        "segments": [],
        "device_traces": [[*(event for _, event in events), taken]],
        "allocator_settings": {},
        "external_annotations": [],
    }


def of_sums(kinds: Mapping[str, float], memory: str) -> list[Block]:
    """A block for each kind of a memory of which only sums are known, all there at once: their sum, rounded, in bytes.

    Args:
        memory: what the sums are of; a block has it where others have a line.
    """
    rounded = {kind: round(nbytes) for kind, nbytes in kinds.items()}
    largest = max(rounded, key=rounded.__getitem__)
    rounded[largest] += round(sum(kinds.values())) - sum(rounded.values())  # lost in rounding
    return [Block(nbytes, kind, memory, "a sum", 0, None) for kind, nbytes in rounded.items() if nbytes]


def write_snapshot(path: Path, blocks: Sequence[Block]) -> None:
    """Writes the blocks as a file for the viewer, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    made = pickle.dumps(snapshot(blocks), protocol=4)  # the one that the viewer reads
    project.write_atomically(path, lambda temporary: temporary.write_bytes(made))


def _frame(line: str, module: str, kind: str) -> dict[str, Any]:
    file, _, number = line.rpartition(":")
    if not (file and number.isdigit()):
        file, number = line, "0"
    return {"filename": file or "?", "line": int(number), "name": f"{module or '-'} ({kind})"}
