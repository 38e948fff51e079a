"""Reads a file of torch's profiler as bars, and joins several ranks' files to one that Perfetto shows.

The format is Chrome's: a list of events, of which those with phase ``X`` have a begin and a duration, in microseconds
(the Trace Event Format; ``torch.profiler.profile.export_chrome_trace``). All ranks of one host have one clock.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pardemo import project
from pardemo.meters.event_stream import EventStream

#: How names of communication begin: gloo's and nccl's work, nccl's kernels.
COMMUNICATION = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")


class Bar(NamedTuple):
    """One bar: seconds on the host's clock; ``lane`` is a thread of the host, or a stream of a GPU.

    ``kind`` is the profiler's: cpu_op (an operator), user_annotation (``record_function``), kernel, gpu_memcpy, ….
    """

    name: str
    kind: str
    lane: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def communicates(self) -> bool:
        """Whether it is the work of a collective itself, and not its start by the program."""
        return self.name.startswith(COMMUNICATION)


def read(path: Path | str) -> list[Bar]:
    """The bars of a rank's file, by their begin, those that contain others first.

    Raises:
        ValueError: it is no trace of torch's profiler, or only a part of one.
    """
    path = Path(path)
    try:
        events, fields = _events(path, bars=True)
        base_s = fields.get("baseTimeNanoseconds", 0) / 1e9
        bars = [_bar(event, base_s) for event in events]
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path.name} has an event that torch's profiler does not write: {error}") from None
    return sorted(bars, key=lambda bar: (bar.begin_s, -bar.end_s))


def _is_bar(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and "dur" in event and event.get("cat") != "Trace"


def _bar(event: dict[str, Any], base_s: float) -> Bar:
    begin_s = base_s + event["ts"] / 1e6
    stream = event.get("args", {}).get("stream")
    lane = f"thread {event['tid']}" if stream is None else f"stream {stream}"
    return Bar(event["name"], event.get("cat", ""), lane, begin_s, begin_s + event["dur"] / 1e6)


def join(paths: Mapping[int, Path | str], out: Path | str) -> Path:
    """Writes one file for Perfetto (ui.perfetto.dev) with a process for each rank.

    Args:
        paths: rank -> its file.

    Raises:
        ValueError: a file is no trace.
    """
    files = {rank: _events(Path(path)) for rank, path in paths.items()}
    base = min(fields.get("baseTimeNanoseconds", 0) for _, fields in files.values())
    events: list[dict[str, Any]] = []
    for rank, (of_rank, fields) in sorted(files.items()):
        shift_us = (fields.get("baseTimeNanoseconds", 0) - base) / 1e3
        name = {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        events += [name, {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}]
        for event in of_rank:
            if event.get("ph") not in ("X", "s", "f"):  # bars, and arrows from forward to backward
                continue
            moved = {**event, "pid": rank, "ts": event["ts"] + shift_us}
            if "id" in event:
                moved["id"] = f"{rank}.{event['id']}"  # each rank counts its arrows from 0
            events.append(moved)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": base})
    project.write_text(Path(out), text)
    return Path(out)


def _events(path: Path, bars: bool = False) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns a file's events, or its bars alone, and its other fields."""
    stream = EventStream(path)
    events = [event for event in stream if not bars or _is_bar(event)]
    if not stream.list:
        raise ValueError(
            f"{path.name} is no trace of torch's profiler; export_chrome_trace writes one, with traceEvents in it"
        )
    return events, stream.fields
