"""Reads a dump of torch's flight recorder: the collectives of one rank, in order, with their lines.

``torch._C._distributed_c10d._dump_nccl_trace`` and ``_dump_fr_trace`` write it, as a pickle or as JSON, when a job's
watchdog ends it or somebody asks (TORCH_FR_BUFFER_SIZE; torch's tutorial *Flight Recorder for Debugging Stuck Jobs*).
"""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from pardemo.script.job_files.records import JobCall, JobRankRecord, collective_kind, dtype_and_size, ranks_of

#: What torch calls the group of all ranks.
DEFAULT = "default_pg"
#: Folders whose frames are a library's, and not the training script's.
_LIBRARIES = ("/torch/", "/site-packages/", "/lib/python")


def record_of(rank: int, entries: Iterable[Any], groups: Any) -> JobRankRecord:
    """Makes a rank's record from the ``entries`` and the ``pg_config`` of its dump.

    Calls of gloo's groups have no ranks there, as a dump does not list them; the caller has to add them.

    Raises:
        ValueError: an entry is none of the flight recorder's.
    """
    try:
        ranks = {str(name): ranks_of(group.get("ranks")) for name, group in dict(groups or {}).items()}
        calls = [_call(rank, entry, ranks) for entry in entries if collective_kind(str(entry["profiling_name"]))]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise ValueError(f"an entry that the flight recorder does not write: {error!r}") from None
    return JobRankRecord(rank, calls)


def _call(rank: int, entry: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> JobCall:
    name, description = (str(part) for part in entry["process_group"])
    title = str(entry["profiling_name"])
    kind, ranks = collective_kind(title), groups.get(name, ())
    inputs, outputs = (_sizes(entry[f"{side}_sizes"]) for side in ("input", "output"))
    dtype, size = dtype_and_size(next(iter([*entry["input_dtypes"], *entry["output_dtypes"]]), ""))
    if kind in ("send", "receive"):
        ranks = _ends(title, ranks)
    begin_s = entry["time_created_ns"] / 1e9
    ended = entry.get("time_discovered_completed_ns")
    over = bool(ended) or bool(entry.get("retired")) or entry.get("state") == "completed"
    duration = entry.get("duration_ms")
    given, number = inputs or outputs, "p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"
    return JobCall(
        kind=kind, ranks=ranks, number=max(int(entry[number]) - 1, 0),
        group=DEFAULT if description == DEFAULT else name,
        nbytes=0 if kind == "barrier" else size * max(sum(map(math.prod, inputs)), sum(map(math.prod, outputs))) or -1,
        shape=tuple(given[0]) if len(given) == 1 else tuple(map(math.prod, given[:8])),
        dtype="" if kind == "barrier" else dtype, line=_line(entry.get("frames") or ()), module="", phase="", step=0,
        begin_s=begin_s, end_s=(ended / 1e9 if ended else begin_s) if over else None,
        lasted_s=None if duration is None else float(duration) / 1e3,
    )  # fmt: skip


def _sizes(shapes: Any) -> list[list[int]]:
    return [[int(size) for size in shape] for shape in shapes]


def _ends(title: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Reads a message's sender and receiver from ``nccl:send 0->1`` or ``nccl:recv 1<-0``, numbered in its group."""
    ends = title.replace("->", " ").replace("<-", " ").split()[1:]
    if len(ends) != 2:
        return ()
    first, second = (int(end) for end in ends)
    sender, receiver = (first, second) if "->" in title else (second, first)
    return (ranks[sender], ranks[receiver]) if ranks else (sender, receiver)


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """Returns the innermost line outside libraries, as ``train.py:88``."""
    for frame in frames:
        file = str(frame["filename"])
        if file.endswith(".py") and not any(folder in file for folder in _LIBRARIES):
            return f"{os.path.basename(file)}:{int(frame['line'])}"
    return ""
