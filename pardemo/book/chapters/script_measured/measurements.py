"""Makes tables of a measured script: its collectives with the text of their lines, and what it logged."""

from pathlib import Path
from typing import TYPE_CHECKING

from pardemo.tables import amount

if TYPE_CHECKING:
    from pardemo.measure import Summary


def rows_of(measured: "Summary", script: Path) -> list[dict[str, str]]:
    """A row for each kind of collective and line: how often a step calls it, what a rank sends, what the line says."""
    lines = script.read_text(encoding="utf-8").splitlines()
    return [
        {
            "collective": row.kind,
            "calls": f"{row.calls:g}",
            "sent": amount(row.bytes),
            "formula": "" if row.expected_bytes is None else amount(row.expected_bytes),
            "line": row.line,
            "which reads": _text(row.line, script.name, lines),
        }
        for row in measured.collectives
    ]


def _text(line: str, name: str, lines: list[str]) -> str:
    """What a line such as ``train.py:23`` says; nothing where it is another file's."""
    file, _, number = line.rpartition(":")
    return lines[int(number) - 1].strip() if file == name else ""


def findings_of(measured: "Summary") -> list[dict[str, str]]:
    """Makes a table of what the measurement would change, a row for each, with its line and what is sent there."""
    return [
        {
            "line": finding.line or "the whole script",
            "what": finding.what,
            "a rank sends": amount(finding.bytes) if finding.bytes else "",
        }
        for finding in measured.findings
    ]


def counted(measured: "Summary") -> float:
    """Bytes that a rank sends in a step: the kernel's count of the rank that sends most, or the calls' without one."""
    return max(measured.wire_bytes or measured.sent_bytes)


def how_counted(measured: "Summary") -> str:
    """The evidence of :func:`counted`: ``wire``, or ``count`` where bytes do not pass the kernel, as nccl's."""
    return "wire" if measured.wire_bytes else "count"


def sent_at(measured: "Summary", kind: str) -> float:
    """Bytes that a rank sends in a step by collectives of one kind, such as ``all-reduce``."""
    return sum(row.bytes for row in measured.collectives if row.kind == kind)


def logged(file: Path) -> list[tuple[float, float]]:
    """Loss and accuracy of each step, as the script has written them."""
    rows = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return [(float(loss), float(accuracy)) for _, loss, accuracy in rows]


def seconds_of(measured: "Summary") -> dict[str, float]:
    """Seconds of a step by what a rank does, the mean over the ranks; without what its process waited for a core."""
    kinds = {"waits for bytes": "exposed_s", "computes": "compute_s", "waits for ranks": "idle_s"}
    return {
        name: sum(getattr(time, field) for time in measured.time) / len(measured.time) for name, field in kinds.items()
    }
