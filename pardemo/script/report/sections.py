"""Writes the report of a measurement: what ran, its bytes, memory and time, and what a reader would change."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pardemo.draw import palette
from pardemo.script import blocks
from pardemo.script.blocks import Block, Chart, Line, Lines, Marked, Section, Table
from pardemo.script.report import drawings
from pardemo.script.step.findings import BY_HAND
from pardemo.script.step.group_kinds import GroupKind, groups_by_kind
from pardemo.script.step.parallelism import Parallelism
from pardemo.script.step.rank_trace import RankTrace
from pardemo.script.step.script_memory import memory_timeline
from pardemo.script.step.summary import CollectiveRow, Summary, Times
from pardemo.script.words import count_text, first_of
from pardemo.tables import amount
from pardemo.world.errors import ranks_text

#: Rows of collectives on a screen; ranks whose memory is drawn beside the fullest one's; ranks of a table of groups.
ROWS, OTHERS, IN_A_TABLE = 12, 7, 32
#: What stands in a bar of a screen for the seconds of :data:`drawings.SPENT`.
MARKS = "█▓░·"
FILES = {
    "summary.json": "all of this",
    "collectives.csv": "the calls, a row for each kind, group and line",
    "calls.csv": "each call of each rank, in order, with its shape, its line, and when it began and was over",
    "trace.json": "for Perfetto or chrome://tracing: steps and collectives of all ranks, and who waits for whom",
    "memory_rank0.pickle": "and one for each other rank, for torch's memory viewer",
}


def summary_screen(summary: Summary, name: str) -> str:
    """Writes the report for a terminal: the findings last, where a reader looks. ``name``: the script's."""
    findings, *rest = sections(summary)
    return blocks.report_screen(summary_head(summary, name), [*rest, findings])


def summary_page(summary: Summary, traces: Sequence[RankTrace], name: str) -> str:
    """Writes the report for a browser, with drawings of what each rank recorded. ``name``: the script's."""
    files: list[Line] = [[Marked("code", name), f" {content}"] for name, content in FILES.items()]
    beside = Section("files", "Beside this page", "", [Lines(files)])
    return blocks.report_page(
        f"{name}, measured", f"{summary_head(summary, name)}.", [*sections(summary, traces), beside]
    )


def sections(summary: Summary, traces: Sequence[RankTrace] = ()) -> list[Section]:
    """Makes the parts of the report. ``traces``: each rank's, from which drawings of a step are made."""
    notes = Section("notes", "What ran in another way", "", [Lines(summary.notes)])
    return [
        _findings(summary), _running(summary), _bytes(summary), _memory(summary, traces), full_size(summary),
        _time(summary, traces), _paced(summary), notes,
    ]  # fmt: skip


def summary_head(summary: Summary, name: str) -> str:
    """Says what ran, on how many ranks, and what was measured of it."""
    m = summary.micro_batches
    micro_batches = f"{m} micro-batches a step" if m > 1 else "one micro-batch a step"
    if summary.closures > 1:
        micro_batches += f", for which the optimizer calls its closure {summary.closures} times"
    ended = "" if summary.ended == "enough" else "; the script ended by itself"
    hosts = f" on {summary.hosts} nodes" if summary.hosts > 1 else ""
    ranks = f"{count_text(summary.ranks, 'rank')}{hosts} ({summary.backend or 'no group'})"
    steps = f"{count_text(summary.steps, 'step')} after three that warm up"
    return f"{name} on {ranks}: the median of {steps}, {micro_batches}{ended}"


def _findings(summary: Summary) -> Section:
    """Lists findings, those about most bytes first."""
    lines: list[Line] = [
        [Marked("code", row.line or "–"), f": {row.what}", Marked("b", f"{amount(row.bytes)} a step" * bool(row.bytes))]
        for row in sorted(summary.findings, key=lambda finding: -finding.bytes)
    ]
    return Section("findings", "Findings", "" if lines else "none", [Lines(lines)])


def _running(summary: Summary) -> Section:
    below: list[Block] = [Lines([*_model(summary), *parallelisms_text(summary)])]
    kinds = groups_by_kind(summary.parallelism)
    if sum(len(kind.groups) for kind in kinds) > 1:  # then a table says more than a line
        below += groups(kinds, summary.ranks, summary.hosts)
        below.append(blocks.note("Ranks with one letter are one group: they exchange what that parallelism sends."))
    return Section("running", "What is running", "", below)


def groups(kinds: Sequence[GroupKind], ranks: int, hosts: int = 1) -> list[Table]:
    """Makes a table: a column for each rank, a row for its node, if there are several, and for each kind of group."""
    letters = [letter for kind in kinds for letter in kind.letters]
    tables = []
    for begin in range(0, ranks, IN_A_TABLE):
        here = range(begin, min(begin + IN_A_TABLE, ranks))
        rows: list[Sequence[Line]] = [("node", *(str(rank * hosts // ranks) for rank in here))] if hosts > 1 else []
        for kind in kinds:
            cells: list[Line] = []
            for letter in map(kind.letter_of, here):
                colour = palette.rank_colour(letters.index(letter)) if letter else ""
                style = f' style="background: {colour}; color: {palette.ink_on(colour)}"' if letter else ""
                cells.append([Marked("mark", letter, style)] if letter else "·")
            rows.append((kind.name, *cells))
        tables.append(Table(("rank", *map(str, here)), rows))
    return tables


def _model(summary: Summary) -> list[str]:
    """Describes the model in a line, with a line each for what is frozen, tied, recomputed, or in another dtype."""
    model = summary.model
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in model["dtypes"].items())
    lines = [f"{', '.join(model['classes']) or 'no model seen'}: {dtypes or 'no'} parameters"]
    if model["frozen"]:
        lines.append(f"frozen: {model['frozen']:,} of {model['parameters']:,}")
    if model.get("copied"):
        lines.append(f"a copy that is only evaluated, as an average is: {model['copied']:,} parameters")
    if model["tied"]:
        lines.append(f"tied: {'; '.join(model['tied'][:3])}")
    if model["recomputed"]:
        lines.append(f"recomputed in the backward pass: {first_of(model['recomputed'], 4)}")
    if model["computed_in"]:
        lines.append(f"autocast computes in {', '.join(model['computed_in'])}")
    return lines


def parallelisms_text(summary: Summary) -> list[str]:
    """Writes a line for each parallelism: its ranks, what it cuts, and its size; equal groups share a line."""
    by_group: dict[tuple[str, tuple[int, ...]], list[Parallelism]] = {}
    for parallelism in summary.parallelism:
        by_group.setdefault((parallelism.kind, parallelism.ranks), []).append(parallelism)
    alike: dict[tuple[str, tuple[str, ...], int], list[tuple[int, ...]]] = {}
    for (kind, ranks), some in by_group.items():  # stages of a pipeline: one group has several
        wraps = tuple(dict.fromkeys(name for p in some for name in p.wraps))
        size = sum(sum(p.unit_bytes.values()) for p in some)
        alike.setdefault((kind, wraps, size), []).append(ranks)
    lines = []
    for (kind, wraps, size), some_ranks in alike.items():
        over = ranks_text(list(some_ranks[0]))
        if len(some_ranks) > 1:
            sizes = sorted({len(ranks) for ranks in some_ranks})
            over = f"{len(some_ranks)} groups of {' or '.join(map(str, sizes))} ranks"
        lines.append(f"{kind} over {over}: {first_of(wraps, 4)}" + (f"; {amount(size)}" if size else ""))
    return lines or [_by_hand(summary) or "no parallelism recognised"]


def _by_hand(summary: Summary) -> str:
    """Describes data parallelism that the script does itself, recognised by its bytes; empty without any."""
    for row in summary.collectives:
        if row.why in BY_HAND:
            site = f" at {row.line}" if row.line else ""
            return f"{BY_HAND[row.why]} over {ranks_text(list(row.ranks))}, by the script itself{site}"
    return ""


def _bytes(summary: Summary) -> Section:
    """Lists what rank 0 sends by algorithms that send least; beside it the kernel's count, where there is one."""
    lead = f"rank 0 sends {amount(summary.sent_bytes[0])} by algorithms that send the least"
    if summary.wire_bytes is not None:
        lead += f"; the kernel counted {amount(summary.wire_bytes[0])}, {summary.backend}'s own algorithms make "
        lead += amount(summary.gloo_bytes[0])
    columns = ("collective", "ranks", "calls", "sent", "formula", "line", "module", "what")
    return Section("bytes", "Bytes a step", lead, [Table(columns, _collectives(summary), most=ROWS)])


def _merge_numbered(rows: list[CollectiveRow]) -> list[CollectiveRow]:
    """Merges rows of modules whose names differ in a number alone, as ``layers.*``."""
    together: dict[tuple, list[CollectiveRow]] = {}
    for row in rows:
        form = re.sub(r"\d+", "*", row.module), re.sub(r"\d+", "*", row.why)
        together.setdefault((row.kind, row.ranks, row.line, row.site.phase, row.dtype, *form), []).append(row)
    merged_rows = []
    for (*_, module, why), some in together.items():
        merged = some[0]
        if len(some) > 1:
            expected = [row.expected_bytes for row in some if row.expected_bytes is not None]
            merged = replace(
                merged, calls=sum(row.calls for row in some), bytes=sum(row.bytes for row in some),
                expected_bytes=sum(expected) if expected else None, site=merged.site._replace(module=module), why=why,
            )  # fmt: skip
        merged_rows.append(merged)
    return sorted(merged_rows, key=lambda row: -row.bytes)


def _collectives(summary: Summary) -> list[Sequence[Line]]:
    """Makes the table of collectives; groups that do the same share a row."""
    together: dict[tuple[str, ...], list[str]] = {}
    for row in _merge_numbered(summary.collectives):
        ranks = " → ".join(map(str, row.ranks)) if row.kind == "send" else ranks_text(list(row.ranks)).partition(" ")[2]
        expected = "" if row.expected_bytes is None else amount(row.expected_bytes)
        most = "" if row.rank is None or row.site.objects else f"rank {row.rank} sends most"
        remark = "; ".join(filter(None, [row.why, most]))
        rest = row.kind, f"{row.calls:g}", amount(row.bytes), expected, row.line, row.module, remark
        together.setdefault(rest, []).append(ranks)
    return [
        (kind, first_of(some, 4, " | "), calls, sent, expected, [Marked("code", line)], module, remark)
        for (kind, calls, sent, expected, line, module, remark), some in together.items()
    ]


def _memory(summary: Summary, traces: Sequence[RankTrace]) -> Section:
    memory = summary.memory
    kinds = ", ".join(f"{kind} {amount(n)}" for kind, n in memory["kinds"].items() if n)
    lead = f"rank {memory['rank']} holds {amount(memory['peak_bytes'])} at the peak, at {memory['line']}: {kinds}"
    rows: list[Sequence[Line]] = [
        (
            amount(tensor["bytes"]), tensor["kind"], f"{' × '.join(map(str, tensor['shape']))} {tensor['dtype']}",
            [Marked("code", tensor["line"])], tensor["module"],
        )
        for tensor in memory["largest"]
    ]  # fmt: skip
    largest = Table(("largest", "kind", "shape", "line", "module"), rows)
    if not traces:
        return Section("memory", "Memory", lead, [largest])
    fullest, *others = sorted(traces, key=lambda trace: trace.rank != memory["rank"])
    below: list[Block] = [blocks.note("The second step, allocation by allocation:"), _course(fullest), largest]
    if others:
        peaks = "; ".join(f"rank {other.rank} {amount(other.memory.peak_bytes)}" for other in others)
        charts = [_course(other, f"Rank {other.rank}") for other in others[:OTHERS]]
        below.append(blocks.Folded("The other ranks", [blocks.paragraphs(f"Their peaks: {peaks}."), *charts]))
    return Section("memory", "Memory", lead, below)


def _course(trace: RankTrace, title: str = "") -> Block:
    """Draws a rank's memory, with a key that has each kind's bytes at the peak."""
    over_time = memory_timeline(trace.memory.blocks)
    if not over_time.columns:
        return blocks.paragraphs("Nothing was allocated.")
    at_peak = over_time.columns[over_time.peak_column]
    held = {
        f"{kind} {amount(at_peak.get(kind, 0))}": colour
        for kind, colour in drawings.HELD.items()
        if any(column.get(kind) for column in over_time.columns)
    }
    ran = {phase for phase, _, _ in over_time.phases}
    phases = {drawings.phase_name(phase): colour for phase, colour in drawings.PHASES.items() if phase in ran}
    return Chart(drawings.memory(over_time, trace.memory.line), {"at the peak": held, "below": phases}, title)


def full_size(summary: Summary) -> Section:
    """Lists planned and measured bytes by kind, and what was taken over and assumed; empty without a question."""
    full, heading = summary.memory.get("full_size"), "At full size"
    if full is None:
        return Section("full-size", heading)
    subject = f"with {full['model']} on {full['gpus']:,} GPU{'s' * (full['gpus'] != 1)}"
    if full["peak_bytes"] is None:
        return Section("full-size", heading, f"{subject}: no plan, since {full['why_not']}")
    lead = f"{subject}, {full['layout']}: {amount(full['peak_bytes'])} a GPU, planned and not measured"
    table = Table(("kind", "here, at the peak", "here, at most", "planned"), _full_size_rows(full))
    assumed = f"assumed: {'; '.join(full['assumed'])}"
    assumptions = blocks.paragraphs("; ".join(full["taken_over"]), assumed, [Marked("code", full["command"])])
    return Section("full-size", heading, lead, [table, assumptions])


def _full_size_rows(full: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Makes a row for each kind: what was held here and what is planned."""
    rows = []
    for kind in dict.fromkeys((*full["measured"], *full["kinds"])):
        here, planned = full["measured"].get(kind), full["kinds"].get(kind)
        if planned or (here and here["most"]):
            cells = ("", "") if here is None else (amount(here["peak"]), amount(here["most"]))
            rows.append((kind, *cells, "" if planned is None else amount(planned)))
    return rows


def _time(summary: Summary, traces: Sequence[RankTrace]) -> Section:
    whose = "the threads that give the GPUs their work" if "nccl" in summary.backend else "this machine's processes"
    below = [*_times(summary.time, 1), blocks.note("Other: reading files, sleeping, other work on the core.")]
    if traces:
        key = {
            "no collective under way": drawings.SPENT["compute_s"],
            "a collective under way": drawings.SPENT["exposed_s"],
            "a collective that waits for its last rank": drawings.SPENT["idle_s"],
        }
        below.append(Chart(drawings.timeline(traces), {"": key}, "One step on each rank"))
    return Section("time", "Time", f"milliseconds of {whose}, in the median step", below)


def _paced(summary: Summary) -> Section:
    """Describes the step on other devices, or by arithmetic next to padded layers; empty without one."""
    paced = summary.paced
    if paced is None:
        return Section("paced", "")
    ran = max(rank_times.step_s for rank_times in summary.time)
    reckoned, alone, ran_ms = (f"{1e3 * seconds:,.2f}" for seconds in (paced.step_s, paced.alone_s, ran))
    if paced.layer_s:
        lead = (
            f"each takes {1e3 * paced.layer_s:g} ms forward and twice that backward; by arithmetic, with all else "
            f"at no cost and these links, a step is {reckoned} ms, and {alone} without communication; it took {ran_ms}"
        )
        return Section("paced", "Layers that wait", lead, _times(paced.time, 2, "nothing"))
    lead = (
        "reckoned, not run: this step's operations at the planner's rates, its collectives as nccl sends them, "
        f"{paced.links}: {reckoned} ms, and {alone} without communication"
    )
    assumed = Lines([f"assumed: {line}" for line in paced.assumed])
    return Section("paced", f"On {paced.on}", lead, [*_times(paced.time, 2, "launches"), assumed])


def _times(times: Sequence[Times], digits: int, other: str = "other") -> list[Block]:
    """Lists seconds by rank: their figures, and bars. ``other``: what the rest of a step is called."""
    names = ("computes", "waits for bytes", "waits for ranks", other)
    rows = [(str(rank.rank), *(f"{1e3 * seconds:.{digits}f}" for seconds in rank.figures)) for rank in times]
    parts = [(part, colour, mark) for (part, colour), mark in zip(drawings.SPENT.items(), MARKS, strict=True)]
    longest = max(sum(getattr(rank, part) for part, _, _ in parts) for rank in times) or 1.0
    bars = [[blocks.Bar(getattr(rank, part) / longest, colour, mark) for part, colour, mark in parts] for rank in times]
    columns = ("rank", "step ms", "computes", "waits for bytes", "hides", "waits for ranks", other)
    key = dict(zip(names, drawings.SPENT.values(), strict=True))
    return [Table(columns, rows, bars, f"█ computes ▓ bytes ░ ranks · {other}"), Chart("", {"": key})]
