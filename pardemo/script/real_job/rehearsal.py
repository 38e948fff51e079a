"""Reads a rehearsal from the folder that ``pardemo measure --out DIR`` writes."""

import csv
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pardemo.script.hangs.journal import COLUMNS, LoggedCall
from pardemo.script.job_files.plain_pickle import read_plain
from pardemo.script.step import WARM_UP_STEPS

#: Kinds of memory by the planner's name, and their names in a measurement.
_PLANNED_AS = {"gathered parameters": "gathered"}


@dataclass
class Rehearsal:
    """The calls and the memory of a rehearsal.

    Args:
        before, period: each rank's calls before the measured steps, and in these, in order.
        steps: how many were measured. groups: ranks and the name of their parallelism.
        memory: bytes by kind at the peak of the rank that holds most. planned: the same for the model at full size.
        kind_of_line: by line of the script the kind of memory that it allocates most of.
        step_s: seconds of a step on GPUs, as ``--pace`` predicted them.
    """

    before: dict[int, list[LoggedCall]]
    period: dict[int, list[LoggedCall]]
    steps: int
    groups: dict[tuple[int, ...], str]
    memory: dict[str, int]
    planned: dict[str, int]
    planned_model: str
    kind_of_line: dict[str, str]
    step_s: float | None

    @property
    def ranks(self) -> int:
        return len(self.period)


def read_rehearsal(folder: Path) -> Rehearsal:
    """Reads a rehearsal's ``summary.json``, ``calls.csv`` and memory snapshots.

    Raises:
        ValueError: the folder has none, or they are not measure's.
    """
    for name in ("summary.json", "calls.csv"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no rehearsal: it has no {name}; pardemo measure --out {folder} writes it")
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        calls = _calls(folder / "calls.csv")
        full = summary["memory"].get("full_size") or {}
        ranks, warm_up = range(summary["ranks"]), range(WARM_UP_STEPS)
        measured = range(WARM_UP_STEPS, WARM_UP_STEPS + summary["steps"])
        return Rehearsal(
            {rank: [call for call in calls.get(rank, ()) if call.step in warm_up] for rank in ranks},
            {rank: [call for call in calls.get(rank, ()) if call.step in measured] for rank in ranks},
            summary["steps"],
            {tuple(ranks): kind["kind"] for kind in summary["groups"] for ranks in kind["groups"]},
            _kinds(summary["memory"]["kinds"]), _kinds(full.get("kinds") or {}), str(full.get("model", "")),
            _kinds_of_lines(folder), (summary["paced"] or {}).get("step_s"),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder} has not what pardemo measure --out writes: {error!r}") from None


def _calls(path: Path) -> dict[int, list[LoggedCall]]:
    calls: dict[int, list[LoggedCall]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if missing := [name for name in COLUMNS if row.get(name) is None]:
                raise ValueError(f"calls.csv has no {missing[0]}")
            if row["kind"] != "new_group":
                calls.setdefault(int(row["rank"]), []).append(LoggedCall(
                    row["kind"], _numbers(row["ranks"]), int(row["number"]), row["group"], int(row["bytes"]),
                    _numbers(row["shape"]), row["dtype"], row["line"], row["module"], row["phase"], int(row["step"]),
                    float(row["begin_s"]), float(row["end_s"]) if row["end_s"] else None,
                ))  # fmt: skip
    return calls


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _kinds(kinds: dict[str, Any]) -> dict[str, int]:
    return {_PLANNED_AS.get(kind, kind): int(nbytes) for kind, nbytes in kinds.items() if nbytes}


def _kinds_of_lines(folder: Path) -> dict[str, str]:
    """Returns for each line of the script the kind of memory that it allocates most of, by the ranks' snapshots."""
    nbytes: dict[str, Counter[str]] = {}
    for path in sorted(folder.glob("memory_rank*.pickle")):
        for event in read_plain(path)["device_traces"][0]:
            if event["action"] == "alloc":
                for frame in event["frames"]:
                    line = f"{frame['filename']}:{frame['line']}"
                    nbytes.setdefault(line, Counter())[event["category"]] += event["size"]
    return {line: kinds.most_common(1)[0][0] for line, kinds in nbytes.items()}
