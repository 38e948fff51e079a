"""A summary as a page: one file, that asks no network for anything, for a desk and a phone, light and dark."""

from collections.abc import Sequence

from pardemo.draw import page_parts
from pardemo.draw.page_parts import Section
from pardemo.draw.page_parts import words as _t
from pardemo.measure import drawings, full_size_text, groups, pace_text, text
from pardemo.measure.course import Course, course
from pardemo.measure.program import Seen
from pardemo.measure.summary import Summary, Times
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
    sections += [_notes(measured), _files()]
    head = f"<p>{_t(text.head(measured, name))}.</p>"
    return page_parts.document(f"{name}, measured", head, sections)


def _findings(measured: Summary) -> Section:
    items = [
        (f"<code>{_t(one.line)}</code>: " if one.line else "")
        + _t(one.what)
        + (f" <b>{_t(amount(one.bytes))} a step</b>" if one.bytes else "")
        for one in text.findings(measured)
    ]
    return Section("findings", "Findings", page_parts.bullets(items) if items else "<p>None.</p>")


def _running(measured: Summary) -> Section:
    body = page_parts.bullets(map(_t, [*text.model(measured), *text.parallelisms(measured)]))
    kinds = groups.kinds(measured.parallelism)
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
    drawn = {one.rank: course(one.memory.blocks) for one in seen}
    lines = {one.rank: one.memory.line for one in seen}
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
    body = f"<h3>At full size</h3><p>{_t(full_size_text.head(full))}.</p>"
    if full["peak_bytes"] is None:
        return body
    body += page_parts.table(full_size_text.COLUMNS, [tuple(map(_whole, row)) for row in full_size_text.rows(full)])
    told = _t(f"{'; '.join(full['taken_over'])}. Assumed: {'; '.join(full['assumed'])}.")
    return f'{body}<p class="note">{told} <code>{_t(full["command"])}</code></p>'


def _course(of: Course, line: str) -> str:
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
    body = f"<p>{_t(page_parts.sentence(pace_text.sentence(measured, paced)))}</p>{_times(paced.time, other)}{told}"
    return Section("paced", pace_text.heading(paced), body)


def _times(times: Sequence[Times], other: str = "other") -> str:
    """Seconds by rank: bars, and their figures. ``other``: what the rest of a step is called."""
    key = dict(zip(("computes", "waits for bytes", "waits for ranks", other), drawings.SPENT.values(), strict=True))
    hidden = {"hidden: bytes that travel while it computes": drawings.HIDDEN} if any(t.hidden_s for t in times) else {}
    rows = [
        (str(one.rank), *(f"{1e3 * s:.1f}" for s in
         (one.step_s, one.compute_s, one.exposed_s, one.hidden_s, one.idle_s, one.other_s)))
        for one in times
    ]  # fmt: skip
    head = ("rank", "step", "computes", "waits for bytes", "hides", "waits for ranks", other)
    table = f"<details><summary>Milliseconds</summary>{page_parts.table(head, rows)}</details>"
    return drawings.time_by_rank(times) + page_parts.key("", key | hidden) + table


def _notes(measured: Summary) -> Section:
    return Section(
        "notes", "What ran in another way", page_parts.bullets(map(_t, measured.notes)) if measured.notes else ""
    )


def _files() -> Section:
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
