"""What a measurement leaves for other tools, and the scratch copy in which a script may write."""

import contextlib
import csv
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.measure import page
from pardemo.measure.program import WARM, Seen
from pardemo.measure.summary import Summary
from pardemo.meters import snapshot

#: Folders that a scratch copy leaves out: environments, histories, caches.
LEFT_OUT = (".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache")
#: A folder above this is no script's: it is refused before a copy fills the disk.
LARGEST_COPY = 2e9
COLUMNS = ("kind", "ranks", "calls", "bytes", "expected_bytes", "dtype", "phase", "line", "module", "why")


@dataclass
class Scratch:
    """A copy of a folder, and the files that it had in the beginning, with their times."""

    folder: str
    before: dict[str, int]

    def told(self) -> str:
        """Which files the script wrote."""
        wrote = [name for name, when in _files(self.folder).items() if self.before.get(name) != when]
        some = ", ".join(sorted(wrote)[:5]) + (f" and {len(wrote) - 5} more" if len(wrote) > 5 else "")
        return f"it ran in a scratch copy, which is removed; it wrote {some}" if wrote else (
            "it ran in a scratch copy, which is removed; it wrote no files"
        )  # fmt: skip


@contextlib.contextmanager
def scratch(folder: str) -> Iterator[Scratch]:
    """A copy of a folder until the block ends.

    Raises:
        ValueError: the folder has more than 2 GB.
    """
    size = sum(os.lstat(os.path.join(folder, name)).st_size for name in _files(folder))
    if size > LARGEST_COPY:
        raise ValueError(f"--copy would copy {size / 1e9:.1f} GB: run it where the script is, and little else")
    with tempfile.TemporaryDirectory(prefix="pardemo-copy-") as temporary:
        copy = os.path.join(temporary, "copy")
        shutil.copytree(folder, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield Scratch(copy, _files(copy))


def folder(path: str) -> Path:
    """The folder for what a measurement leaves, made where there is none.

    Raises:
        ValueError: it cannot be one, or nothing can be written there; said before anything runs.
    """
    made = Path(path)
    try:
        made.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=made):
            pass
    except FileExistsError:
        raise ValueError(f"--out is a folder, and {path} is a file") from None
    except OSError as error:
        raise ValueError(f"--out: nothing can be written to {path}: {error.strerror}") from None
    return made


def write(folder: Path, measured: Summary, seen: Sequence[Seen], script: str) -> None:
    """A page, a JSON summary, a CSV of collectives, a trace for Perfetto, memory snapshots for torch's viewer."""
    texts = {
        "page.html": page.page(measured, seen, script),
        "summary.json": json.dumps(measured.as_json(), indent=1),
        "trace.json": json.dumps({"traceEvents": events(seen)}),
    }
    for name, text in texts.items():
        project.write_atomically(folder / name, functools.partial(_text, text))

    made = {folder / f"memory_rank{one.rank}.pickle": one.memory.blocks for one in seen}
    for path, blocks in made.items():
        snapshot.write(path, blocks)
    for left in {*folder.glob("memory_rank*.pickle")} - made.keys():  # of an earlier run, which had more ranks
        left.unlink()

    def table(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            for row in measured.as_json()["collectives"]:
                writer.writerow(row | {"ranks": " ".join(map(str, row["ranks"]))})

    project.write_atomically(folder / "collectives.csv", table)


def events(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """The measured steps as trace events: a process for each rank, its steps and its collectives as rows.

    Calls of one collective on several ranks are joined by a flow, from the rank that came last to the others: what
    they waited for.
    """
    begin = min(one.cuts[WARM - 1].at_s for one in seen)
    made: list[dict[str, Any]] = []
    together: dict[tuple[str, tuple[int, ...], int], list[tuple[float, int, int]]] = {}
    for one in seen:
        made.append({"ph": "M", "name": "process_name", "pid": one.rank, "args": {"name": f"rank {one.rank}"}})
        calls = [call for call in one.calls if WARM <= call.step < len(one.cuts)]
        rows = _rows([(call.begin_s, call.end_s or call.begin_s) for call in calls])
        names = [
            "steps",
            "collectives",
            *(f"collectives at the same time, {n}" for n in range(2, max(rows, default=1) + 1)),
        ]
        for tid, name in enumerate(names):
            made.append({"ph": "M", "name": "thread_name", "pid": one.rank, "tid": tid, "args": {"name": name}})
        for step in range(WARM, len(one.cuts)):
            span = one.cuts[step - 1].at_s, one.cuts[step].at_s
            made.append(_event(f"step {step - WARM}", one.rank, 0, *span, begin, {}))
        for call, row in zip(calls, rows, strict=True):
            told = {
                "bytes": call.nbytes, "sent": call.sent, "ranks": list(call.ranks), "dtype": call.dtype,
                "line": call.place.line, "module": call.place.module, "phase": call.place.phase,
            }  # fmt: skip
            name = f"{call.kind} {call.place.module or call.place.line}".strip()
            made.append(_event(name, one.rank, row, call.begin_s, call.end_s or call.begin_s, begin, told))
            together.setdefault((call.group, call.ranks, call.number), []).append((call.begin_s, one.rank, row))
    for flow, of_ranks in enumerate(together.values()):
        last_s, last, of_last = max(of_ranks)
        for begin_s, rank, row in of_ranks:
            if rank != last and begin_s < last_s:
                at = {"name": "waits for", "cat": "flow", "id": f"{flow}.{rank}", "ts": (last_s - begin) * 1e6}
                made.append(at | {"ph": "s", "pid": last, "tid": of_last})
                made.append(at | {"ph": "f", "bp": "e", "pid": rank, "tid": row})
    return made


def _rows(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Of each span a row, from 1 on, in which none before it is still there: viewers draw no bars over each other."""
    ends: list[float] = []
    rows = [0] * len(spans)
    for place in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[place]
        free = next((row for row, until in enumerate(ends) if until <= begin), len(ends))
        ends[free:] = [end, *ends[free + 1 :]]
        rows[place] = free + 1
    return rows


def _text(text: str, temporary: Path) -> None:
    temporary.write_text(text, "utf-8")


def _event(
    name: str, rank: int, tid: int, begin_s: float, end_s: float, zero_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": rank, "tid": tid, "ts": (begin_s - zero_s) * 1e6,
        "dur": max((end_s - begin_s) * 1e6, 0.1), "args": args,
    }  # fmt: skip


def _files(folder: str) -> dict[str, int]:
    """Files of a folder and when they changed, in ns, without :data:`LEFT_OUT`."""
    found = {}
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(OSError):
                found[os.path.relpath(path, folder)] = os.lstat(path).st_mtime_ns
    return found
