"""What a step did as a page of one file, that asks no network, for a desk and a phone, light and dark."""

import csv
import functools
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.draw import page_parts, palette
from pardemo.draw.canvas import Canvas
from pardemo.draw.page_parts import Section
from pardemo.draw.page_parts import words as _t
from pardemo.draw.parts import width_of
from pardemo.meters import snapshot
from pardemo.script.report import text
from pardemo.script.step import parallelisms
from pardemo.script.step.memory import MemoryTimeline, memory_timeline
from pardemo.script.step.parallelisms import GroupKind
from pardemo.script.step.summary import WARM, Seen, Summary, Times, last_begun, waiting_spans
from pardemo.tables import amount
from pardemo.world.errors import ranks_text

WIDE, TEXT = 640, 18
#: Ranks that stand beside one another in the drawing of groups.
IN_A_LINE = 16
#: What memory holds -> its colour, from the bottom of a stack to its top.
HELD = {
    "held between steps": palette.SHADES["held between steps"],
    "parameters": palette.KEPT["parameters"],
    "optimizer states": palette.KEPT["optimizer states"],
    "gradients": palette.KEPT["gradients"],
    "gathered": palette.SHADES["gathered parameters"],
    "communication buffers": palette.SHADES["buckets"],
    "activations": palette.KEPT["activations"],
    "logits": palette.SHADES["logits"],
    "temporaries": palette.SHADES["temporaries"],
    "random states": palette.KNOWN[0],
}
PHASES = {
    "forward": palette.DONE["forward"],
    "backward": palette.DONE["backward"],
    "step": palette.NEW,
    "evaluation": palette.KNOWN[0],
}
#: Seconds of a step -> their colour; what hides is drawn below what is computed.
SPENT = {
    "compute_s": palette.COMPUTED,
    "exposed_s": palette.DONE["communication"],
    "idle_s": palette.DONE["idle"],
    "other_s": palette.KNOWN[1],
}
HIDDEN = palette.RECEIVED


def groups(kinds: Sequence[GroupKind], ranks: int, hosts: int = 1) -> str:
    """Ranks as boxes in the frames of their hosts; below, a row for each kind of group, with the group's letter."""
    beside = ranks // hosts
    label = max(width_of(text, TEXT) for text in ("rank", *(kind.name for kind in kinds))) + 24
    lines = list(_lines_of_hosts(ranks, beside))
    gap, row = 14, 36
    most = max(sum(map(len, line)) + gap / 30 * (len(line) - 1) for line in lines)
    cell = min((WIDE - label - 8) / most, 60.0)
    high = (len(kinds) + 1) * row + (40 if hosts > 1 else 16)
    canvas = Canvas(WIDE, high * len(lines))
    colours = {letter: n for n, letter in enumerate(letter for kind in kinds for letter in kind.letters)}
    for number, line in enumerate(lines):
        top = number * high + (30 if hosts > 1 else 6)
        for place, name in enumerate(("rank", *(kind.name for kind in kinds))):
            canvas.text(label - 10, top + row * place + row / 2 - 2, name, size=TEXT, anchor="end")
        x = label
        for host in line:
            wide = cell * len(host)
            if hosts > 1:
                canvas.text(x + wide / 2, top - 16, f"node {host[0] // beside}", size=TEXT)
            canvas.box(x - 4, top - 4, wide + 8, row * (len(kinds) + 1) + 4, dashed=True, thick=1)
            for rank in host:
                canvas.box(x + cell * (rank - host[0]) + 1, top, cell - 2, row - 6, "none", str(rank), size=TEXT)
            for place, kind in enumerate(kinds, 1):
                for begin, end, letter in _group_runs(kind, host):
                    left, fill = x + cell * (begin - host[0]) + 1, "none"
                    if letter:
                        fill = palette.rank_colour(colours[letter])
                    where = left, top + row * place, cell * (end - begin) - 2, row - 6
                    canvas.box(*where, fill, letter, size=TEXT, dashed=not letter, thick=1.5 if letter else 1)
            x += wide + gap
    told = "; ".join(
        f"{letter}, {kind.name}: {ranks_text(list(of))}"
        for kind in kinds
        for letter, of in zip(kind.letters, kind.groups, strict=True)
    )
    return canvas.svg(f"The groups of {ranks} ranks. {told}.")


def memory(course: MemoryTimeline, line: str) -> str:
    """A step's memory by kind, one above the other, change by change; its peak, and what ran."""
    canvas = Canvas(WIDE, 330)
    columns, peak = course.columns, course.peak_bytes
    shares = {share: amount(share * peak) for share in (0.25, 0.5, 0.75, 1)}
    left, right, top, bottom = max(width_of(name, TEXT) for name in shares.values()) + 12, WIDE - 4.0, 40.0, 284.0
    wide = (right - left) / max(len(columns), 1)

    def height(nbytes: float) -> float:
        return bottom - (bottom - top) * nbytes / max(peak, 1)

    there = [kind for kind in HELD if any(column.get(kind) for column in columns)]
    sums = [0.0] * len(columns)
    edges: list[tuple[str, list[float]]] = []
    for kind in there:
        sums = [before + column.get(kind, 0) for before, column in zip(sums, columns, strict=True)]
        edges.append((kind, [height(one) for one in sums]))
    for kind, upper in reversed(edges):  # each down to the axis: the next one covers what is below it
        canvas.steps(left, wide, upper, bottom, HELD[kind])
    for share, name in shares.items():
        y = height(share * peak)
        canvas.line([(left - 4, y), (right, y)], palette.OTHER, 0.8, dashed=True)
        canvas.text(left - 8, y, name, size=TEXT, anchor="end")
    canvas.line([(left, bottom), (right, bottom)])
    x = left + wide * (course.peak_column + 0.5)
    canvas.line([(x, top - 6), (x, bottom)], dashed=True)
    words = f"peak {amount(peak)}" + (f" at {line}" if line else "")
    half = width_of(words, TEXT) / 2
    canvas.text(min(max(x, left + half), right - half), top - 22, words, size=TEXT, bold=True)
    for phase, begin, end in course.phases:
        if phase in PHASES:
            a, b = left + wide * begin, left + wide * end
            name = "optimizer" if phase == "step" else phase
            fits = width_of(name, TEXT) < b - a - 6
            canvas.box(a, bottom + 8, b - a, 30, PHASES[phase], name if fits else "", size=TEXT, thick=0.8)
    told = ", ".join(f"{kind} {amount(n)}" for kind, n in course.columns[course.peak_column].items() if n)
    return canvas.svg(f"Memory of one step by kind, over its allocations; {words}: {told}.")


def time_by_rank(times: Sequence[Times]) -> str:
    """Each rank's step as a bar: what it computes, waits for bytes, waits for ranks, and what is neither."""
    row = 40 if len(times) <= IN_A_LINE else 28
    label = width_of(f"rank {len(times) - 1}", TEXT) + 12
    canvas = Canvas(WIDE, row * len(times) + 4)
    values = [f"{1e3 * rank_times.step_s:.1f} ms" for rank_times in times]
    room = WIDE - label - max(map(width_of, values)) - 14
    longest = max(sum(getattr(rank_times, part) for part in SPENT) for rank_times in times) or 1.0
    for number, (one, value) in enumerate(zip(times, values, strict=True)):
        y, x = 4 + row * number, label
        canvas.text(label - 10, y + row / 2 - 6, f"rank {one.rank}", size=TEXT, anchor="end")
        for part, colour in SPENT.items():
            wide = room * getattr(one, part) / longest
            canvas.boxes([(x, y, wide, row - 16)] if wide else [], colour, thick=0.8)
            x += wide
        if one.hidden_s > 0:
            canvas.boxes([(label, y + row - 14, room * min(one.hidden_s / longest, 1), 6)], HIDDEN, thick=0.8)
        canvas.text(x + 8, y + row / 2 - 6, value, size=TEXT, anchor="start")
    told = "; ".join(
        f"rank {t.rank}: {1e3 * t.compute_s:.1f} computing, {1e3 * t.exposed_s:.1f} waiting for bytes, "
        f"{1e3 * t.idle_s:.1f} for ranks, {1e3 * t.other_s:.1f} other"
        for t in times
    )
    return canvas.svg(f"Milliseconds of the median step by rank. {told}.")


def timeline(seen: Sequence[Seen]) -> str:
    """One step on each rank: when a collective was under way, and when it waited for the last of its ranks to begin."""
    step = _median_step(seen)
    begin = min(trace.cuts[step - 1].at_s for trace in seen)
    long = max(trace.cuts[step].at_s for trace in seen) - begin or 1.0
    row = 34 if len(seen) <= IN_A_LINE else 28
    label = width_of(f"rank {len(seen) - 1}", TEXT) + 12
    bottom, right = row * len(seen) + 6, WIDE - 6
    canvas = Canvas(WIDE, bottom + 34)
    scale = (right - label) / long
    last = last_begun(seen)
    for number, one in enumerate(seen):
        y, high = 4 + row * number, row - 10
        canvas.text(label - 10, y + high / 2, f"rank {one.rank}", size=TEXT, anchor="end")
        since, until = one.cuts[step - 1].at_s, one.cuts[step].at_s
        canvas.boxes([(label + scale * (since - begin), y, scale * (until - since), high)], palette.COMPUTED, thick=0.8)
        calls = [call for call in one.calls if call.step == step]
        flights = [(call.begin_s, min(call.end_s or call.begin_s, until)) for call in calls]
        stood = [(a, min(b, until)) for a, b in one.waits if since <= a < until]
        late = [(a, b) for a, b in waiting_spans(calls, stood, last) if b > a]
        for some, colour in (([*flights, *stood], palette.DONE["communication"]), (late, palette.DONE["idle"])):
            spans = _merge_spans(some, 0.5 / scale)
            places = [(label + scale * (a - begin), y, max(scale * (b - a), 0.5), high) for a, b in spans]
            canvas.boxes(places, colour, border=colour, thick=0)
    canvas.line([(label, bottom), (right, bottom)])
    for tick in _ticks(1e3 * long):
        x = label + scale * tick / 1e3
        canvas.line([(x, bottom), (x, bottom + 6)])
        name = f"{tick:g} ms"
        canvas.text(min(x, right - width_of(name) / 2), bottom + 20, name, size=TEXT)
    return canvas.svg(f"One step of {1e3 * long:.1f} ms on {len(seen)} ranks: when collectives were under way.")


def _lines_of_hosts(ranks: int, beside: int) -> Iterator[list[range]]:
    """Ranks as lines of hosts' parts: whole hosts beside one another while they have room, large ones in pieces."""
    pieces = [
        range(begin, min(begin + IN_A_LINE, host + beside))
        for host in range(0, ranks, beside)
        for begin in range(host, host + beside, IN_A_LINE)
    ]
    line: list[range] = []
    for piece in pieces:
        if line and sum(map(len, line)) + len(piece) > IN_A_LINE:
            yield line
            line = []
        line.append(piece)
    yield line


def _group_runs(kind: GroupKind, host: range) -> Iterator[tuple[int, int, str]]:
    """First rank, the one after the last, and letter of neighbours in one group; each alone that is in none."""
    begin = host[0]
    for rank in host:
        letter, after = kind.letter_of(rank), kind.letter_of(rank + 1) if rank + 1 in host else None
        if letter != after or not letter:
            yield begin, rank + 1, letter
            begin = rank + 1


def _median_step(seen: Sequence[Seen]) -> int:
    """The measured step whose length on rank 0 is the median."""
    steps = range(WARM, min(len(trace.cuts) for trace in seen))
    cuts = seen[0].cuts
    long = {step: cuts[step].at_s - cuts[step - 1].at_s for step in steps}
    return min(steps, key=lambda step: abs(long[step] - statistics.median_low(long.values())))


def _merge_spans(spans: Sequence[tuple[float, float]], least_s: float) -> list[tuple[float, float]]:
    """The union of spans; those that are closer than a drawing can show are one."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and begin <= joined[-1][1] + least_s:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _ticks(longest: float) -> list[float]:
    """Round numbers from 0 up to ``longest``, three to five of them."""
    size = 10.0 ** len(str(int(longest)))
    step = next((size / parts for parts in (5, 10, 20, 50) if longest * parts >= 2 * size), size / 100)
    return [n * step for n in range(int(longest / step) + 1)]


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
        body += groups(kinds, measured.ranks, measured.hosts)
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
    there = [kind for kind in HELD if any(column.get(kind) for column in of.columns)]
    key = {f"{kind} {amount(at_peak.get(kind, 0))}": HELD[kind] for kind in there}
    phases = {"optimizer" if phase == "step" else phase: colour for phase, colour in PHASES.items()
              if any(phase == one for one, _, _ in of.phases)}  # fmt: skip
    return memory(of, line) + page_parts.key("at the peak", key) + page_parts.key("below", phases)


def _time(measured: Summary, seen: Sequence[Seen]) -> Section:
    body = f"<p>Seconds {_t(text.whose_time(measured))}; the median step.</p>{_times(measured.time)}"
    body += '<p class="note">Other: reading files, sleeping, other work on the core.</p>'
    key = {
        "no collective under way": SPENT["compute_s"],
        "a collective under way": SPENT["exposed_s"],
        "a collective that waits for its last rank": SPENT["idle_s"],
    }
    body += f"<h3>One step on each rank</h3>{timeline(seen)}{page_parts.key('', key)}"
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
    key = dict(zip(("computes", "waits for bytes", "waits for ranks", other), SPENT.values(), strict=True))
    hidden = {"hidden: bytes that travel while it computes": HIDDEN} if any(t.hidden_s for t in times) else {}
    rows = [(str(rank_times.rank), *(f"{1e3 * seconds:.1f}" for seconds in rank_times.figures)) for rank_times in times]
    head = ("rank", "step", "computes", "waits for bytes", "hides", "waits for ranks", other)
    table = f"<details><summary>Milliseconds</summary>{page_parts.table(head, rows)}</details>"
    return time_by_rank(times) + page_parts.key("", key | hidden) + table


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
