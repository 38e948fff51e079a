"""Claims: what was predicted, what was measured, and whether one is the other.

A chapter declares its claims as data (:mod:`.declarations`), opens a :class:`Ledger`, records each in one line as it
goes, and closes it in its last cell, which fails the notebook when a claim fails. Ids: ``sNN.…`` for the article's
statements, ``chapter.…`` for a chapter's own findings.
"""

from collections.abc import Iterable

from pardemo import extras
from pardemo.claims.declarations import Claim
from pardemo.claims.ledger import ClaimFailed, Ledger, read, read_ledger
from pardemo.claims.lines import by_claim, summary, worst
from pardemo.claims.verdicts import COLUMNS, EVIDENCE, VERDICTS, ClaimRow, agrees, follows, predicted_text, short

__all__ = [
    "COLUMNS",
    "EVIDENCE",
    "VERDICTS",
    "Claim",
    "ClaimFailed",
    "ClaimRow",
    "Ledger",
    "agrees",
    "by_claim",
    "counts",
    "follows",
    "frame",
    "predicted_text",
    "read",
    "read_ledger",
    "short",
    "summary",
    "worst",
]


def frame(rows: Iterable[ClaimRow]):
    """A pandas table for readers: figures shortened, bounds with their sign, equalities with their tolerance."""
    with extras.needed_by(f"{__name__}.frame"):
        import pandas as pd

    table_rows = [{**row, "predicted": predicted_text(row), "measured": short(row["measured"])} for row in rows]
    columns = ["id", "statement", "case", "predicted", "measured", "unit", "evidence", "verdict"]
    columns = [name for name in columns if name != "case" or any(row["case"] for row in table_rows)]
    if any(row["reason"] for row in table_rows):
        columns.append("reason")
    return pd.DataFrame(table_rows, columns=columns)


def counts(rows: Iterable[ClaimRow]) -> dict[str, int]:
    """Counts the cases of each verdict."""
    verdicts = [row["verdict"] for row in rows]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}
