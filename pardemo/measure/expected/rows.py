"""Rows of a group, and what several of them are expected to send together."""

from collections.abc import Iterable

from pardemo.measure.summary import Finding, Row, Summary
from pardemo.tables import amount

#: Bytes up to which a message's time is its latency's, whatever the link.
SMALL = 4096


def rows_of(measured: Summary, kinds: Iterable[str], ranks: tuple[int, ...]) -> list[Row]:
    """A group's rows of these kinds, without those of an evaluation: no formula of a step is for them."""
    of_group = [row for row in measured.collectives if row.kind in kinds and row.ranks == ranks]
    return [row for row in of_group if row.place.phase != "evaluation"]


def low_precision(measured: Summary) -> str:
    """The dtype of 16 bits in which autocast computes, if one does."""
    return next((dtype for dtype in measured.model["computed_in"] if dtype in ("bfloat16", "float16")), "")


def shared(rows: list[Row], whole: float, why: str, name: str = "", reason: str = "") -> list[Finding]:
    """What several rows are expected to send together, told by their shares; a finding where they do not."""
    sent = sum(row.bytes for row in rows)
    for row in rows:
        row.expected_bytes = whole * row.bytes / sent if sent else None
        row.why = why
    if not rows or not whole or abs(sent / whole - 1) < 0.05:
        return []
    named = f"{name or why}: the formula says {amount(whole)} a step, {amount(sent)} were sent"
    return [Finding(f"{named}: {reason}" if reason else named, rows[0].line, max(sent - whole, 0.0))]
