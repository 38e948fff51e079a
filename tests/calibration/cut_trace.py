"""Cuts a public trace of torch's profiler to what ``pardemo compare`` and the page about traces read of it.

``python tests/calibration/cut_trace.py nccl_data.json.gz OUT.json.gz``: kernels, copies, collectives and the program's
own bars stay, with the fields that are read; other events, the log and the call stacks go. Times stay as they are.
"""

import gzip
import json
import sys
from pathlib import Path

KEPT = ("kernel", "gpu_memcpy", "user_annotation", "gpu_user_annotation")
ARGUMENTS = (
    "External id", "stream", "bytes", "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size",
    "Process Group Name", "Process Group Ranks",
)  # fmt: skip
DEVICE = ("id", "name", "totalGlobalMem")


def cut(source: Path, out: Path) -> None:
    """Writes the part of a trace that is read; a name of a kernel ends before its arguments."""
    with gzip.open(source, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    events = [
        {name: event[name] for name in ("ph", "cat", "pid", "tid", "ts", "dur")}
        | {"name": event["name"].split("(", 1)[0] if event["cat"] == "kernel" else event["name"],
           "args": {name: event["args"][name] for name in ARGUMENTS if name in event["args"]}}
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and (event["cat"] in KEPT or event["name"] == "record_param_comms")
    ]  # fmt: skip
    kept = {name: trace[name] for name in ("schemaVersion", "baseTimeNanoseconds", "distributedInfo")}
    kept["deviceProperties"] = [{name: each[name] for name in DEVICE} for each in trace["deviceProperties"]]
    text = json.dumps(kept | {"traceEvents": events}, separators=(",", ":"))
    out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    cut(*map(Path, sys.argv[1:]))
