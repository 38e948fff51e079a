"""A rank's memory in one step, in the format of torch's memory snapshots (https://docs.pytorch.org/memory_viz)."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Block(NamedTuple):
    """A storage of the followed step: its bytes, what it is, who made it, and when it came and went.

    Args:
        born, died: numbers of changes, in their order; ``died`` None for what outlives the step.
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
    """What ``torch.cuda.memory._dump_snapshot`` would have written of these blocks, each at an address of its own.

    A block's only frame is the script's line; its function's name says the module and the kind.
    """
    events: list[tuple[int, dict[str, Any]]] = []
    address = 0x7F0000000000
    for block in blocks:
        file, _, line = block.line.rpartition(":")
        frame = {"filename": file or "?", "line": int(line or 0), "name": f"{block.module or '-'} ({block.kind})"}
        event = {"addr": address, "size": block.bytes, "stream": 0, "frames": [frame], "time_us": 0}
        events.append((block.born, event | {"action": "alloc", "time_us": block.born}))
        if block.died is not None:
            events.append((block.died, event | {"action": "free_completed", "time_us": block.died}))
        address += -(-block.bytes // 512) * 512 or 512
    events.sort(key=lambda event: event[0])
    return {
        "segments": [],
        "device_traces": [[event for _, event in events]],
        "allocator_settings": {},
        "external_annotations": [],
    }
