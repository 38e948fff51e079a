"""A summary on one screen."""

import re
from collections.abc import Iterable
from dataclasses import replace

from pardemo.measure.summary import Row, Summary
from pardemo.tables import amount, text_table
from pardemo.world.errors import ranks_text

ROWS = 12


def screen(measured: Summary, name: str) -> str:
    """What is running, bytes, memory, time, findings: in this order, each with its line of the script."""
    parts = [_head(measured, name), _running(measured), _bytes(measured), _memory(measured), _time(measured)]
    return "\n\n".join([*parts, _findings(measured)])


def _head(measured: Summary, name: str) -> str:
    m = measured.micro_batches
    of = f"{m} backward passes a step" if m > 1 else "one backward pass a step"
    ended = "" if measured.ended == "enough" else "; the script ended by itself"
    ranks = f"{measured.ranks} rank{'s' if measured.ranks > 1 else ''} ({measured.backend or 'no group'})"
    steps = f"{measured.steps} step{'s' if measured.steps > 1 else ''} after three that warm up"
    return f"{name} on {ranks}: the median of {steps}, {of}{ended}"


def _running(measured: Summary) -> str:
    model = measured.model
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in model["dtypes"].items())
    lines = [f"WHAT IS RUNNING  {', '.join(model['classes']) or 'no model seen'}: {dtypes or 'no'} parameters"]
    if model["frozen"]:
        lines.append(f"  frozen: {model['frozen']:,} of {model['parameters']:,}")
    if model["tied"]:
        lines.append(f"  tied: {'; '.join(model['tied'][:3])}")
    if model["recomputed"]:
        lines.append(f"  recomputed in the backward pass: {_some(model['recomputed'])}")
    if model["computed_in"]:
        lines.append(f"  autocast computes in {', '.join(model['computed_in'])}")
    lines += [
        f"  {p.kind} over {ranks_text(list(p.ranks))}: {_some(p.wraps)}"
        + (f"; {amount(sum(p.unit_bytes.values()))}" if p.unit_bytes else "")
        for p in measured.parallelism
    ]
    if not measured.parallelism:
        lines.append("  no parallelism recognised")
    lines += [f"  note: {note}" for note in measured.notes]
    return "\n".join(lines)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _groups(groups: list[str]) -> str:
    return " | ".join(groups[:4]) + (f" and {len(groups) - 4} more" if len(groups) > 4 else "")


def _bytes(measured: Summary) -> str:
    total = measured.sent_bytes[0]
    counted = ""
    if measured.wire_bytes is not None:
        counted = f"; the kernel counted {amount(measured.wire_bytes[0])}, {measured.backend}'s own algorithms make "
        counted += amount(measured.gloo_bytes[0])
    lines = [f"BYTES A STEP  rank 0 sends {amount(total)} by algorithms that send the least{counted}"]
    table: list[tuple[str, ...]] = [("", "collective", "ranks", "calls", "sent", "formula", "line", "module", "what")]
    rows = _rows(_alike(measured.collectives))
    table += rows[:ROWS]
    lines.append(text_table(table))
    if len(rows) > ROWS:
        lines.append(f"  and {len(rows) - ROWS} more rows (--json has all)")
    return "\n".join(lines)


def _alike(rows: list[Row]) -> list[Row]:
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


def _rows(rows: list[Row]) -> list[tuple[str, ...]]:
    """The table's rows; groups that do the same share one."""
    together: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        ranks = " → ".join(map(str, row.ranks)) if row.kind == "send" else ranks_text(list(row.ranks)).partition(" ")[2]
        expected = "" if row.expected_bytes is None else amount(row.expected_bytes)
        rest = row.kind, f"{row.calls:g}", amount(row.bytes), expected, row.line, row.module, row.why
        together.setdefault(rest, []).append(ranks)
    return [("", kind, _groups(groups), *rest) for (kind, *rest), groups in together.items()]


def _memory(measured: Summary) -> str:
    memory = measured.memory
    kinds = ", ".join(f"{kind} {amount(n)}" for kind, n in memory["kinds"].items() if n)
    peak = f"rank {memory['rank']} holds {amount(memory['peak_bytes'])} at the peak, at {memory['line']}"
    lines = [f"MEMORY  {peak}: {kinds}"]
    table: list[tuple[str, ...]] = [("", "largest", "kind", "shape", "line", "module")]
    for one in memory["largest"]:
        shape = " × ".join(map(str, one["shape"])) + f" {one['dtype']}"
        table.append(("", amount(one["bytes"]), one["kind"], shape, one["line"], one["module"]))
    return "\n".join([*lines, text_table(table)])


def _time(measured: Summary) -> str:
    table: list[tuple[str, ...]] = [
        ("", "rank", "step ms", "computes", "waits for bytes", "hides", "waits for ranks", "other")
    ]
    for one in measured.time:
        figures = (one.step_s, one.compute_s, one.exposed_s, one.hidden_s, one.idle_s, one.other_s)
        table.append(("", str(one.rank), *(f"{1e3 * seconds:.1f}" for seconds in figures)))
    whose = (
        "of the threads that give the GPUs their work" if "nccl" in measured.backend else "of this machine's processes"
    )
    return f"TIME  {whose}\n{text_table(table)}"


def _findings(measured: Summary) -> str:
    if not measured.findings:
        return "FINDINGS  none"
    lines = ["FINDINGS"]
    for one in sorted(measured.findings, key=lambda finding: -finding.bytes):
        about = f" [{amount(one.bytes)} a step]" if one.bytes else ""
        lines.append(f"  {one.line or '–'}: {one.what}{about}")
    return "\n".join(lines)
