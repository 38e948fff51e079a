"""Reads the public trace of this chapter, of which README.md beside it says where it is from."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pardemo.script.job_files.records import JobCall

#: Rank 0 of two A100s, three steps of ResNet-50 with DDP.
PUBLIC_TRACE = Path(__file__).with_name("two_a100.json.gz")


def bucket_rows(calls: Iterable[JobCall]) -> list[dict[str, Any]]:
    """Makes a row for each of DDP's buckets of two ranks: its size, its all-reduce in each step, its best rate."""
    buckets: dict[int, list[JobCall]] = defaultdict(list)
    for call in calls:
        buckets[call.nbytes].append(call)
    rows = []
    for nbytes, of_steps in buckets.items():
        seconds = [call.lasted_s or 0.0 for call in of_steps]
        exposed = sum(call.exposed_s for call in of_steps) / sum(seconds)
        rows.append({
            "bucket": f"{nbytes / 1e6:.1f} MB", "ms, step by step": ", ".join(f"{1e3 * s:.1f}" for s in seconds),
            "exposed": f"{100 * exposed:.0f} %", "fastest": f"{nbytes / min(seconds) / 1e9:.1f} GB/s",
        })  # fmt: skip
    return rows
