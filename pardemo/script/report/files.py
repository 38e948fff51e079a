"""Writes the files of ``pardemo measure --out``: JSON, tables, a trace for Perfetto, snapshots of memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.meters import snapshot
from pardemo.script.report import sections
from pardemo.script.step import WARM_UP_STEPS
from pardemo.script.step.rank_trace import RankTrace
from pardemo.script.step.summary import Summary

COLUMNS = ("kind", "ranks", "calls", "bytes", "expected_bytes", "dtype", "phase", "line", "module", "why")


def clear_reports(folder: Path) -> None:
    """Removes what an earlier measurement has left, which may have failed or had more ranks."""
    names = ("page.html", "summary.json", "trace.json", "collectives.csv", "standstill.json", "memory_rank*.pickle")
    for left in (left for name in names for left in folder.glob(name)):
        left.unlink()


def write_report(folder: Path, summary: Summary, traces: Sequence[RankTrace], script: str) -> None:
    """Writes a page, a JSON summary, a CSV of collectives, a trace for Perfetto, and snapshots for torch's viewer."""
    texts = {
        "page.html": sections.summary_page(summary, traces, script),
        "summary.json": json.dumps(summary.as_json(), indent=1),
        "trace.json": json.dumps({"traceEvents": events(traces)}),
    }
    for name, content in texts.items():
        project.write_text(folder / name, content)

    for trace in traces:
        snapshot.write_snapshot(folder / f"memory_rank{trace.rank}.pickle", trace.memory.blocks)
    rows = [row | {"ranks": " ".join(map(str, row["ranks"]))} for row in summary.as_json()["collectives"]]
    project.write_csv(folder / "collectives.csv", COLUMNS, [[row[name] for name in COLUMNS] for row in rows])


def events(traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Returns the measured steps as trace events: a process for each rank, its steps and collectives as rows.

    Calls of one collective on several ranks are joined by a flow, from the rank that came last to the others: what
    they waited for.
    """
    zero_s = min(trace.cuts[WARM_UP_STEPS - 1].at_s for trace in traces)
    trace_events: list[dict[str, Any]] = []
    together: dict[tuple[str, tuple[int, ...], int], list[tuple[float, int, int]]] = {}
    for trace in traces:

        def add(name: str, row: int, begin_s: float, end_s: float, rank: int = trace.rank, **fields: Any) -> None:
            span = {"ts": (begin_s - zero_s) * 1e6, "dur": max((end_s - begin_s) * 1e6, 0.1)}
            trace_events.append({"ph": "X", "name": name, "pid": rank, "tid": row, "args": fields} | span)

        def names(kind: str, name: str, tid: int = 0, rank: int = trace.rank) -> None:
            trace_events.append({"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": name}})

        names("process_name", f"rank {trace.rank}")
        calls = [call for call in trace.calls if WARM_UP_STEPS <= call.step < len(trace.cuts)]
        rows = _rows([(call.begin_s, call.end_s or call.begin_s) for call in calls])
        for tid in range(max(rows, default=1) + 1):
            also = f"collectives at the same time, {tid}"
            names("thread_name", ("steps", "collectives")[tid] if tid < 2 else also, tid)
        for step in range(WARM_UP_STEPS, len(trace.cuts)):
            add(f"step {step - WARM_UP_STEPS}", 0, trace.cuts[step - 1].at_s, trace.cuts[step].at_s)
        for call, row in zip(calls, rows, strict=True):
            site = call.site
            add(
                f"{call.kind} {site.module or site.line}".strip(), row, call.begin_s, call.end_s or call.begin_s,
                bytes=call.nbytes, sent=call.sent, ranks=list(call.ranks), dtype=call.dtype, line=site.line,
                module=site.module, phase=site.phase,
            )  # fmt: skip
            together.setdefault(call.key, []).append((call.begin_s, trace.rank, row))
    for flow, begins in enumerate(together.values()):
        last_s, last, last_row = max(begins)
        for begin_s, rank, row in begins:
            if rank != last and begin_s < last_s:
                at = {"name": "waits for", "cat": "flow", "id": f"{flow}.{rank}", "ts": (last_s - zero_s) * 1e6}
                trace_events.append(at | {"ph": "s", "pid": last, "tid": last_row})
                trace_events.append(at | {"ph": "f", "bp": "e", "pid": rank, "tid": row})
    return trace_events


def _rows(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Returns a row for each span, from 1 on, so that no two spans of a row overlap: viewers cannot draw that."""
    ends: list[float] = []
    rows = [0] * len(spans)
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[index]
        free = next((row for row, until in enumerate(ends) if until <= begin), len(ends))
        ends[free:] = [end, *ends[free + 1 :]]
        rows[index] = free + 1
    return rows
