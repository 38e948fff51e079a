"""A summary as a page: one file, that asks no network for anything, for a desk and a phone, light and dark."""

import csv
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.draw import page_parts
from pardemo.draw.page_parts import Section
from pardemo.draw.page_parts import words as _t
from pardemo.meters import snapshot
from pardemo.script.report import drawings, text
from pardemo.script.step import parallelisms
from pardemo.script.step.memory import MemoryTimeline, memory_timeline
from pardemo.script.step.rank import WARM, Seen
from pardemo.script.step.summary import Summary, Times
from pardemo.tables import amount

#: Ranks whose memory is drawn beside that of the rank that holds most.
OTHERS = 7


def page(measured: Summary, seen: Sequence[Seen], name: str) -> str:
    """The page: findings first, since they are what a reader would change; then as on the screen, with drawings.

    Args:
        seen: what each rank saw, of which the drawings are made. name: the script's.
    """
    sections = [
        _findings(measured),
        _running(measured),
        _bytes(measured),
        _memory(measured, seen),
        _time(measured, seen),
        _paced(measured),
    ]
    notes = page_parts.bullets(map(_t, measured.notes)) if measured.notes else ""
    sections += [Section("notes", "What ran in another way", notes), _files_section()]
    head = f"<p>{_t(text.head(measured, name))}.</p>"
    return page_parts.document(f"{name}, measured", head, sections)


def _findings(measured: Summary) -> Section:
    items = [
        (f"<code>{_t(finding.line)}</code>: " if finding.line else "")
        + _t(finding.what)
        + (f" <b>{_t(amount(finding.bytes))} a step</b>" if finding.bytes else "")
        for finding in text.findings(measured)
    ]
    return Section("findings", "Findings", page_parts.bullets(items) if items else "<p>None.</p>")


def _running(measured: Summary) -> Section:
    body = page_parts.bullets(map(_t, [*text.model(measured), *text.parallelisms_text(measured)]))
    kinds = parallelisms.groups_by_kind(measured.parallelism)
    if kinds and measured.ranks > 1:
        body += drawings.groups(kinds, measured.ranks, measured.hosts)
        body += '<p class="note">Ranks with one letter are one group: they exchange what that parallelism sends.</p>'
    return Section("running", "What is running", body)


def _bytes(measured: Summary) -> Section:
    rows = [
        (
            f"{_t(calls)} × {_t(kind)} {_place(line, module)}<small>{_t(why)}</small>",
            _t(ranks.replace(" → ", "\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}")),
            _whole(sent),
            _whole(expected),
        )
        for kind, ranks, calls, sent, expected, line, module, why in text.collectives(measured)
    ]
    table = page_parts.table(("collectives", "ranks", "a rank sends", "formula"), rows) if rows else ""
    return Section("bytes", "Bytes a step", f"<p>{_t(page_parts.sentence(text.sent(measured)))}</p>{table}")


def _memory(measured: Summary, seen: Sequence[Seen]) -> Section:
    fullest = measured.memory["rank"]
    drawn = {trace.rank: memory_timeline(trace.memory.blocks) for trace in seen}
    lines = {trace.rank: trace.memory.line for trace in seen}
    body = f"<p>{_t(page_parts.sentence(text.peak(measured)))} The second step, allocation by allocation:</p>"
    body += _course(drawn[fullest], lines[fullest])
    rows = [
        (_whole(nbytes), f"{_t(kind)}<small>{_t(shape)}</small>", _place(line, module))
        for nbytes, kind, shape, line, module in text.largest(measured)
    ]
    body += "<h3>The largest at the peak</h3>" + page_parts.table(("bytes", "kind and shape", "made at"), rows)
    others = [rank for rank in drawn if rank != fullest]
    if others:
        peaks = "; ".join(f"rank {rank} {amount(drawn[rank].peak_bytes)}" for rank in others)
        pictures = "".join(f"<h3>Rank {rank}</h3>{_course(drawn[rank], lines[rank])}" for rank in others[:OTHERS])
        body += f"<details><summary>The other ranks</summary><p>Their peaks: {_t(peaks)}.</p>{pictures}</details>"
    return Section("memory", "Memory", body + _full_size(measured))


def _full_size(measured: Summary) -> str:
    """What the planner says of the model at full size, beside what was held here."""
    full = measured.memory.get("full_size")
    if full is None:
        return ""
    body = f"<h3>At full size</h3><p>{_t(text.full_size_head(full))}.</p>"
    if full["peak_bytes"] is None:
        return body
    body += page_parts.table(text.FULL_SIZE_COLUMNS, [tuple(map(_whole, row)) for row in text.full_size_rows(full)])
    told = _t(f"{'; '.join(full['taken_over'])}. Assumed: {'; '.join(full['assumed'])}.")
    return f'{body}<p class="note">{told} <code>{_t(full["command"])}</code></p>'


def _course(of: MemoryTimeline, line: str) -> str:
    """The picture of a rank's memory, and its key with what each kind has at the peak."""
    if not of.columns:
        return "<p>Nothing was allocated.</p>"
    at_peak = of.columns[of.peak_column]
    there = [kind for kind in drawings.HELD if any(column.get(kind) for column in of.columns)]
    key = {f"{kind} {amount(at_peak.get(kind, 0))}": drawings.HELD[kind] for kind in there}
    phases = {"optimizer" if phase == "step" else phase: colour for phase, colour in drawings.PHASES.items()
              if any(phase == one for one, _, _ in of.phases)}  # fmt: skip
    return drawings.memory(of, line) + page_parts.key("at the peak", key) + page_parts.key("below", phases)


def _time(measured: Summary, seen: Sequence[Seen]) -> Section:
    body = f"<p>Seconds {_t(text.whose_time(measured))}; the median step.</p>{_times(measured.time)}"
    body += '<p class="note">Other: reading files, sleeping, other work on the core.</p>'
    key = {
        "no collective under way": drawings.SPENT["compute_s"],
        "a collective under way": drawings.SPENT["exposed_s"],
        "a collective that waits for its last rank": drawings.SPENT["idle_s"],
    }
    body += f"<h3>One step on each rank</h3>{drawings.timeline(seen)}{page_parts.key('', key)}"
    return Section("time", "Time", body)


def _paced(measured: Summary) -> Section:
    """The step as it would be on other devices, or by arithmetic beside layers that waited."""
    paced = measured.paced
    if paced is None:
        return Section("paced", "", "")
    other = "nothing" if paced.layer_s else "launching"
    told = f'<p class="note">Assumed: {_t("; ".join(paced.told))}.</p>' if paced.told else ""
    body = f"<p>{_t(page_parts.sentence(text.pace_sentence(measured, paced)))}</p>{_times(paced.time, other)}{told}"
    return Section("paced", text.pace_heading(paced), body)


def _times(times: Sequence[Times], other: str = "other") -> str:
    """Seconds by rank: bars, and their figures. ``other``: what the rest of a step is called."""
    key = dict(zip(("computes", "waits for bytes", "waits for ranks", other), drawings.SPENT.values(), strict=True))
    hidden = {"hidden: bytes that travel while it computes": drawings.HIDDEN} if any(t.hidden_s for t in times) else {}
    rows = [(str(rank_times.rank), *(f"{1e3 * seconds:.1f}" for seconds in rank_times.figures)) for rank_times in times]
    head = ("rank", "step", "computes", "waits for bytes", "hides", "waits for ranks", other)
    table = f"<details><summary>Milliseconds</summary>{page_parts.table(head, rows)}</details>"
    return drawings.time_by_rank(times) + page_parts.key("", key | hidden) + table


def _files_section() -> Section:
    files = {
        "summary.json": "all of this",
        "collectives.csv": "the calls, a row for each kind, group and line",
        "calls.csv": "each call of each rank, in order, with its shape, its line, and when it began and was over",
        "trace.json": "for Perfetto or chrome://tracing: steps and collectives of all ranks, and who waits for whom",
        "memory_rank0.pickle": "and one for each other rank, for torch's memory viewer",
    }
    return Section(
        "files", "Beside this page", page_parts.bullets(f"<code>{_t(one)}</code> {_t(of)}" for one, of in files.items())
    )


def _place(line: str, module: str) -> str:
    """A line of the script, and the module that ran."""
    return " ".join(
        [*([f"<code>{_t(line)}</code>"] if line else []), *([f"<span>{_t(module)}</span>"] if module else [])]
    )


def _whole(words: str) -> str:
    """A figure with its unit, in one line."""
    return _t(words.replace(" ", "\N{NO-BREAK SPACE}"))


COLUMNS = ("kind", "ranks", "calls", "bytes", "expected_bytes", "dtype", "phase", "line", "module", "why")


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
        "page.html": page(measured, seen, script),
        "summary.json": json.dumps(measured.as_json(), indent=1),
        "trace.json": json.dumps({"traceEvents": events(seen)}),
    }
    for name, content in texts.items():
        project.write_atomically(folder / name, functools.partial(Path.write_text, data=content, encoding="utf-8"))

    made = {folder / f"memory_rank{trace.rank}.pickle": trace.memory.blocks for trace in seen}
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
    begin = min(trace.cuts[WARM - 1].at_s for trace in seen)
    made: list[dict[str, Any]] = []
    together: dict[tuple[str, tuple[int, ...], int], list[tuple[float, int, int]]] = {}
    for trace in seen:
        made.append({"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": f"rank {trace.rank}"}})
        calls = [call for call in trace.calls if WARM <= call.step < len(trace.cuts)]
        rows = _rows([(call.begin_s, call.end_s or call.begin_s) for call in calls])
        names = [
            "steps",
            "collectives",
            *(f"collectives at the same time, {n}" for n in range(2, max(rows, default=1) + 1)),
        ]
        for tid, name in enumerate(names):
            made.append({"ph": "M", "name": "thread_name", "pid": trace.rank, "tid": tid, "args": {"name": name}})
        for step in range(WARM, len(trace.cuts)):
            span = trace.cuts[step - 1].at_s, trace.cuts[step].at_s
            made.append(_event(f"step {step - WARM}", trace.rank, 0, *span, begin, {}))
        for call, row in zip(calls, rows, strict=True):
            told = {
                "bytes": call.nbytes, "sent": call.sent, "ranks": list(call.ranks), "dtype": call.dtype,
                "line": call.place.line, "module": call.place.module, "phase": call.place.phase,
            }  # fmt: skip
            name = f"{call.kind} {call.place.module or call.place.line}".strip()
            made.append(_event(name, trace.rank, row, call.begin_s, call.end_s or call.begin_s, begin, told))
            together.setdefault((call.group, call.ranks, call.number), []).append((call.begin_s, trace.rank, row))
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


def _event(
    name: str, rank: int, tid: int, begin_s: float, end_s: float, zero_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": rank, "tid": tid, "ts": (begin_s - zero_s) * 1e6,
        "dur": max((end_s - begin_s) * 1e6, 0.1), "args": args,
    }  # fmt: skip
