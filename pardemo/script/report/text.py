"""What was measured, on one screen."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pardemo.script.step import parallelisms
from pardemo.script.step.findings import BY_HAND
from pardemo.script.step.parallelisms import GroupKind, Parallelism
from pardemo.script.step.summary import Finding, Paced, Row, Summary, Times
from pardemo.script.words import first_of
from pardemo.tables import amount, text_table
from pardemo.world.errors import ranks_text

#: Ranks that stand beside one another in a terminal.
RANKS_IN_A_LINE = 32


def groups_text(some: Sequence[GroupKind], ranks: int, hosts: int = 1) -> str:
    """A column for each rank, a row for each kind, the letters of the groups as cells; hosts are parted by a line."""
    beside = ranks // hosts
    lines = []
    for begin in range(0, ranks, RANKS_IN_A_LINE):
        here = range(begin, min(begin + RANKS_IN_A_LINE, ranks))
        rows = [["", "rank", *map(str, here)]]
        rows += [["", kind.name, *(kind.letter_of(rank) or "·" for rank in here)] for kind in some]
        for row in rows:
            row[2:] = [
                f"│ {cell}" if rank and rank % beside == 0 else cell for rank, cell in zip(here, row[2:], strict=True)
            ]
        lines.append(text_table(rows))
    return "\n".join(lines)


FULL_SIZE_COLUMNS = ("kind", "here, at the peak", "here, at most", "planned")


def full_size_lines(measured: Summary) -> str:
    """The planned bytes by kind beside the measured ones, what was taken over and assumed; empty without a question."""
    full = measured.memory.get("full_size")
    if full is None:
        return ""
    if full["peak_bytes"] is None:
        return f"\nAT FULL SIZE  {full_size_head(full)}"
    table = text_table([("", *FULL_SIZE_COLUMNS), *(("", *row) for row in full_size_rows(full))])
    told = [f"  {'; '.join(full['taken_over'])}", f"  assumed: {'; '.join(full['assumed'])}", f"  {full['command']}"]
    return "\n".join([f"\nAT FULL SIZE  {full_size_head(full)}", table, *told])


def full_size_head(full: dict[str, Any]) -> str:
    """What is planned of which model; or why nothing is."""
    what = f"{full['model']} on {full['gpus']:,} GPU{'s' * (full['gpus'] != 1)}"
    if full["peak_bytes"] is None:
        return f"{what}: no plan, since {full['why_not']}"
    return f"{what}, {full['layout']}: {amount(full['peak_bytes'])} a GPU, planned and not measured"


def full_size_rows(full: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """By kind, of :data:`COLUMNS`."""
    made = []
    for kind in dict.fromkeys((*full["measured"], *full["kinds"])):
        here, planned = full["measured"].get(kind), full["kinds"].get(kind)
        if planned or (here and here["most"]):
            cells = ("", "") if here is None else (amount(here["peak"]), amount(here["most"]))
            made.append((kind, *cells, "" if planned is None else amount(planned)))
    return made


def pace_lines(measured: Summary) -> str:
    """The step as it would be, by rank; beside a run whose layers waited, the same by arithmetic. Empty without one."""
    paced = measured.paced
    if paced is None:
        return ""
    if paced.layer_s:
        return f"{pace_heading(paced).upper()}  {pace_sentence(measured, paced)}"
    table: list[tuple[str, ...]] = [
        ("", "rank", "step ms", "computes", "waits for bytes", "hides", "waits for ranks", "launches")
    ]
    table += [("", str(times.rank), *(f"{1e3 * s:.2f}" for s in times.figures)) for times in paced.time]
    head = f"ON {paced.on}  {pace_sentence(measured, paced)}"
    return "\n".join([head, text_table(table), *(f"  assumed: {line}" for line in paced.told)])


def pace_heading(paced: Paced) -> str:
    """``On H100``, or what waited."""
    return "Layers that wait" if paced.layer_s else f"On {paced.on}"


def pace_sentence(measured: Summary, paced: Paced) -> str:
    """What a step takes so, and without communication."""
    ran = max(rank_times.step_s for rank_times in measured.time)
    reckoned, alone, ran_ms = (f"{1e3 * seconds:,.2f}" for seconds in (paced.step_s, paced.alone_s, ran))
    if paced.layer_s:
        return (
            f"each takes {1e3 * paced.layer_s:g} ms forward and twice that backward; by arithmetic, with all else at "
            f"no cost and these links, a step is {reckoned} ms, and {alone} without communication; it took {ran_ms}"
        )
    return (
        "reckoned, not run: this step's operations at the planner's rates, its collectives as nccl sends them, "
        f"{paced.links}: {reckoned} ms, and {alone} without communication"
    )


ROWS = 12
#: Characters of a line, and of a module's name in a table.
WIDE, NAME = 160, 34
#: Seconds of a step -> the character that stands for them in a bar of so many.
MARKS = {"compute_s": "█", "exposed_s": "▓", "idle_s": "░", "other_s": "·"}
BAR = 40


def screen(measured: Summary, name: str) -> str:
    """What is running, bytes, memory, time, findings: in this order, each with its line of the script."""
    parts = [head(measured, name), _running(measured), _bytes(measured), _memory(measured), _time(measured)]
    parts += filter(None, [pace_lines(measured)])
    lines = "\n\n".join([*parts, _findings(measured)]).splitlines()
    return "\n".join(part for line in lines for part in _folded(line))


def _folded(line: str) -> list[str]:
    """A line as several, where a screen has no room for it; those that follow are indented."""
    if len(line) <= WIDE:
        return [line]
    return textwrap.wrap(line, WIDE, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def head(measured: Summary, name: str) -> str:
    """What ran, on how many ranks, and what was measured of it."""
    m = measured.micro_batches
    of = f"{m} micro-batches a step" if m > 1 else "one micro-batch a step"
    if measured.closures > 1:
        of += f", for which the optimizer calls its closure {measured.closures} times"
    ended = "" if measured.ended == "enough" else "; the script ended by itself"
    hosts = f" on {measured.hosts} nodes" if measured.hosts > 1 else ""
    ranks = f"{measured.ranks} rank{'s' if measured.ranks > 1 else ''}{hosts} ({measured.backend or 'no group'})"
    steps = f"{measured.steps} step{'s' if measured.steps > 1 else ''} after three that warm up"
    return f"{name} on {ranks}: the median of {steps}, {of}{ended}"


def model(measured: Summary) -> list[str]:
    """The model in a line, and a line each for what is frozen, tied, recomputed, computed in another dtype."""
    of = measured.model
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in of["dtypes"].items())
    lines = [f"{', '.join(of['classes']) or 'no model seen'}: {dtypes or 'no'} parameters"]
    if of["frozen"]:
        lines.append(f"frozen: {of['frozen']:,} of {of['parameters']:,}")
    if of["tied"]:
        lines.append(f"tied: {'; '.join(of['tied'][:3])}")
    if of["recomputed"]:
        lines.append(f"recomputed in the backward pass: {first_of(of['recomputed'], 4)}")
    if of["computed_in"]:
        lines.append(f"autocast computes in {', '.join(of['computed_in'])}")
    return lines


def parallelisms_text(measured: Summary) -> list[str]:
    """A line for each parallelism: over which ranks, of what, and how large; groups that have the same share one."""
    of_group: dict[tuple[str, tuple[int, ...]], list[Parallelism]] = {}
    for parallelism in measured.parallelism:
        of_group.setdefault((parallelism.kind, parallelism.ranks), []).append(parallelism)
    alike: dict[tuple[str, tuple[str, ...], int], list[tuple[int, ...]]] = {}
    for (kind, ranks), some in of_group.items():  # stages of a pipeline: one group has several
        wraps = tuple(dict.fromkeys(name for one in some for name in one.wraps))
        size = sum(sum(one.unit_bytes.values()) for one in some)
        alike.setdefault((kind, wraps, size), []).append(ranks)
    lines = []
    for (kind, wraps, size), some_ranks in alike.items():
        over = ranks_text(list(some_ranks[0]))
        if len(some_ranks) > 1:
            sizes = sorted({len(ranks) for ranks in some_ranks})
            over = f"{len(some_ranks)} groups of {' or '.join(map(str, sizes))} ranks"
        lines.append(f"{kind} over {over}: {first_of(wraps, 4)}" + (f"; {amount(size)}" if size else ""))
    return lines or [_by_hand(measured) or "no parallelism recognised"]


def _by_hand(measured: Summary) -> str:
    """Data parallel that the script does itself, told by its bytes; empty where there is none."""
    for row in measured.collectives:
        if row.why in BY_HAND:
            where = f" at {row.line}" if row.line else ""
            return f"{BY_HAND[row.why]} over {ranks_text(list(row.ranks))}, by the script itself{where}"
    return ""


def _running(measured: Summary) -> str:
    first, *rest = [*model(measured), *parallelisms_text(measured)]
    lines = [f"WHAT IS RUNNING  {first}", *(f"  {line}" for line in rest)]
    kinds = parallelisms.groups_by_kind(measured.parallelism)
    if sum(len(kind.groups) for kind in kinds) > 1:  # then a drawing says more than a line
        lines.append(groups_text(kinds, measured.ranks, measured.hosts))
    lines += [f"  note: {note}" for note in measured.notes]
    return "\n".join(lines)


def _shorten(name: str) -> str:
    """A module's name with its middle left out, where it is long."""
    return name if len(name) <= NAME else f"{name[: NAME // 2 - 1]}…{name[-NAME // 2 :]}"


def sent(measured: Summary) -> str:
    """What rank 0 sends by algorithms that send least; beside it the kernel's count, where there is one."""
    counted = ""
    if measured.wire_bytes is not None:
        counted = f"; the kernel counted {amount(measured.wire_bytes[0])}, {measured.backend}'s own algorithms make "
        counted += amount(measured.gloo_bytes[0])
    return f"rank 0 sends {amount(measured.sent_bytes[0])} by algorithms that send the least{counted}"


def _bytes(measured: Summary) -> str:
    head = ("", "collective", "ranks", "calls", "sent", "formula", "line", "module", "what")
    rows = [("", *row[:6], _shorten(row[6]), row[7]) for row in collectives(measured)]
    lines = [f"BYTES A STEP  {sent(measured)}", text_table(_fold_last_column([head, *rows[:ROWS]]))]
    if len(rows) > ROWS:
        lines.append(f"  and {len(rows) - ROWS} more rows (--json has all)")
    return "\n".join(lines)


def _fold_last_column(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A table whose last column is folded, where a screen has no room for it."""
    room = max(WIDE - sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1]), 20)
    folded = []
    for *cells, last in rows:
        first, *more = textwrap.wrap(last, room) or [""]
        folded.append((*cells, first))
        folded += [(*("" for _ in cells), line) for line in more]
    return folded


def _merge_numbered(rows: list[Row]) -> list[Row]:
    """Rows of modules whose names differ in a number alone, as one: ``layers.*``."""
    together: dict[tuple, list[Row]] = {}
    for row in rows:
        form = re.sub(r"\d+", "*", row.module), re.sub(r"\d+", "*", row.why)
        together.setdefault((row.kind, row.ranks, row.line, row.place.phase, row.dtype, *form), []).append(row)
    made = []
    for (*_, module, why), some in together.items():
        one = some[0]
        if len(some) > 1:
            expected = [row.expected_bytes for row in some if row.expected_bytes is not None]
            one = replace(
                one, calls=sum(row.calls for row in some), bytes=sum(row.bytes for row in some),
                expected_bytes=sum(expected) if expected else None, place=one.place._replace(module=module), why=why,
            )  # fmt: skip
        made.append(one)
    return sorted(made, key=lambda row: -row.bytes)


def collectives(measured: Summary) -> list[tuple[str, ...]]:
    """Rows: collective, ranks, calls, sent, formula, line, module, what; groups that do the same share one."""
    together: dict[tuple[str, ...], list[str]] = {}
    for row in _merge_numbered(measured.collectives):
        ranks = " → ".join(map(str, row.ranks)) if row.kind == "send" else ranks_text(list(row.ranks)).partition(" ")[2]
        expected = "" if row.expected_bytes is None else amount(row.expected_bytes)
        most = "" if row.rank is None or row.place.objects else f"rank {row.rank} sends most"
        what = "; ".join(filter(None, [row.why, most]))
        rest = row.kind, f"{row.calls:g}", amount(row.bytes), expected, row.line, row.module, what
        together.setdefault(rest, []).append(ranks)
    return [(kind, first_of(some, 4, " | "), *rest) for (kind, *rest), some in together.items()]


def peak(measured: Summary) -> str:
    """Who holds most, and where."""
    memory = measured.memory
    return f"rank {memory['rank']} holds {amount(memory['peak_bytes'])} at the peak, at {memory['line']}"


def largest(measured: Summary) -> list[tuple[str, ...]]:
    """Rows of a table: bytes, kind, shape, line, module."""
    rows: list[tuple[str, ...]] = []
    for tensor in measured.memory["largest"]:
        shape = " × ".join(map(str, tensor["shape"])) + f" {tensor['dtype']}"
        rows.append((amount(tensor["bytes"]), tensor["kind"], shape, tensor["line"], tensor["module"]))
    return rows


def _memory(measured: Summary) -> str:
    kinds = ", ".join(f"{kind} {amount(n)}" for kind, n in measured.memory["kinds"].items() if n)
    head = ("", "largest", "kind", "shape", "line", "module")
    table = text_table([head, *(("", *row[:4], _shorten(row[4])) for row in largest(measured))])
    return f"MEMORY  {peak(measured)}: {kinds}\n{table}{full_size_lines(measured)}"


def whose_time(measured: Summary) -> str:
    """What the seconds are seconds of."""
    if "nccl" in measured.backend:
        return "of the threads that give the GPUs their work"
    return "of this machine's processes"


def _time(measured: Summary) -> str:
    names = ("computes", "waits for bytes", "hides", "waits for ranks", "other")
    marks = (MARKS["compute_s"], MARKS["exposed_s"], "", MARKS["idle_s"], MARKS["other_s"])
    head = ("", "rank", "step ms", *(f"{name} {mark}".strip() for name, mark in zip(names, marks, strict=True)), "")
    longest = max(sum(getattr(times, part) for part in MARKS) for times in measured.time)
    rows = [
        ("", str(times.rank), *(f"{1e3 * seconds:.1f}" for seconds in times.figures), _bar(times, longest))
        for times in measured.time
    ]
    return f"TIME  {whose_time(measured)}\n{text_table([head, *rows])}"


def _bar(times: Times, longest: float) -> str:
    """A rank's step as characters, :data:`BAR` for the longest; each part ends where its seconds do."""
    bar, until = "", 0.0
    for part, mark in MARKS.items():
        until += getattr(times, part)
        bar += mark * (round(BAR * until / longest) - len(bar)) if longest else ""
    return bar


def findings(measured: Summary) -> list[Finding]:
    """Those about most bytes first."""
    return sorted(measured.findings, key=lambda finding: -finding.bytes)


def _findings(measured: Summary) -> str:
    if not measured.findings:
        return "FINDINGS  none"
    lines = ["FINDINGS"]
    for finding in findings(measured):
        about = f" [{amount(finding.bytes)} a step]" if finding.bytes else ""
        lines.append(f"  {finding.line or '–'}: {finding.what}{about}")
    return "\n".join(lines)
