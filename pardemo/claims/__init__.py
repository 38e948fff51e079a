"""Claims: what was predicted, what was measured, and whether one is the other.

A notebook opens a :class:`Ledger`, checks its statements as it goes, and closes it in its last cell, which
fails the notebook when a claim fails. Ids: ``sNN.…`` for the article's statements, ``NN.…`` for findings of
chapter NN.
"""

import csv
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.tables import show

EVIDENCE = {
    "wire": "bytes counted by the kernel",
    "memory": "bytes of tensors, followed one by one",
    "numeric": "results compared",
    "count": "operations counted",
    "time": "seconds on this machine",
    "paced": "seconds, where a wait stands for computation",
    "arithmetic": "recomputed only",
    "published": "figures of a paper, compared",
}
RELATIONS = ("equal", "at most", "at least")
VERDICTS = ("holds", "differs", "not measured", "off", "fails")
COLUMNS = (
    "id", "notebook", "statement", "source", "predicted", "measured", "unit", "rel", "evidence", "verdict", "reason",
    "relation",
)  # fmt: skip
_AS_PREDICTED = "measured as"
_ID = re.compile(r"(s\d{2,3}|\d{2})\.[a-z0-9_.]+")


class ClaimFailed(AssertionError):
    """At least one claim of a notebook does not hold."""


class Ledger:
    """The claims of one notebook, written to ``<output folder>/claims/<notebook>.json`` after each check.

    >>> claims = Ledger("01_data_parallel", folder="example")      # doctest: +SKIP
    >>> claims.check("s09.sent_per_rank", "a rank sends 2(N−1)/N·S", predicted=6291456, measured=wire.sent_bytes,
    ...              unit="B", rel=0.005, source="Patarasuk & Yuan 2009", evidence="wire")   # doctest: +SKIP
    """

    def __init__(self, notebook: str, folder: str | Path | None = None):
        self.notebook = notebook
        self._path = Path(folder or project.output_dir()) / "claims" / f"{notebook}.json"
        self._rows: dict[str, dict[str, Any]] = {}
        self._write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def check(
        self,
        id: str,
        statement: str,
        predicted: float | bool | str,
        measured: float | bool | str,
        unit: str = "",
        rel: float = 0.0,
        source: str = "",
        evidence: str = "numeric",
        *,
        relation: str = "equal",
        instead: tuple[float | bool | str, str] | None = None,
        reason: str = "",
    ) -> str:
        """Compares and books one claim; returns its verdict.

        A cell that is run again in JupyterLab books its claims again: the same id with the same statement replaces the
        earlier row. With another statement it would be a second claim that hides the first, and is refused; so is any
        second booking in a run without a reader (``PARDEMO_HEADLESS``), where no cell runs twice.

        Args:
            predicted, measured: in ``unit``. Equal means |measured − predicted| ≤ ``rel``·|predicted|.
            relation: ``"equal"``, ``"at most"`` or ``"at least"`` (for bounds and tolerances; ``rel`` is ignored).
            evidence: how it was measured, one of :data:`EVIDENCE`.
            instead: (value, reason) that holds where ``predicted`` does not: the verdict is then *differs*.
            reason: what a reader should know about this measurement. A ``published`` figure that a model of ours
                misses for a known reason is *off* with it, as times are; without one it fails.

        Raises:
            ValueError: an id, evidence or relation that does not exist; an id that another claim has; a bound on
                something that has no order.
        """
        if evidence not in EVIDENCE:
            raise ValueError(f"evidence must be one of {', '.join(EVIDENCE)}, not {evidence!r}")
        if relation not in RELATIONS:
            raise ValueError(f"relation must be one of {', '.join(RELATIONS)}, not {relation!r}")
        predicted, measured = _plain(predicted), _plain(measured)
        if _agree(predicted, measured, rel, relation):
            verdict = "holds"
        elif instead is not None and _agree(_plain(instead[0]), measured, rel, relation):
            verdict, reason = "differs", f"{_AS_PREDICTED} {short(_plain(instead[0]))} predicts: {instead[1]}"
        elif _may_be_off(evidence, reason):
            verdict = "off"
        else:
            verdict = "fails"
        self._book(id, statement, source, predicted, measured, unit, rel, evidence, verdict, reason, relation)
        return verdict

    def skip(self, id: str, statement: str, reason: str, source: str = "") -> str:
        """Books a claim that could not be measured here, and why."""
        if not reason:
            raise ValueError("a claim is only skipped with a reason")
        self._book(id, statement, source, None, None, "", 0.0, "", "not measured", reason, "equal")
        return "not measured"

    def table(self, *prefixes: str):
        """The claims so far as a table for the notebook; only those whose ids begin so, where prefixes are given."""
        return show(frame([row for row in self.rows if not prefixes or row["id"].startswith(prefixes)]))

    def close(self):
        """Returns the table of all claims; raises :class:`ClaimFailed` naming each claim that fails."""
        failed = [r for r in self.rows if r["verdict"] == "fails"]
        if failed:
            told = "; ".join(
                f"{r['id']} ({r['statement']}): predicted {r['predicted']}, measured {r['measured']} {r['unit']}"
                for r in failed
            )
            raise ClaimFailed(f"{len(failed)} of {len(self._rows)} claims fail: {told}")
        return self.table()

    def _book(self, id: str, *values: Any) -> None:
        if not _ID.fullmatch(id):
            raise ValueError(f"a claim's id looks like s09.sent_per_rank or 01.bucket_order, not {id!r}")
        row = dict(zip(COLUMNS, (id, self.notebook, *values), strict=True))
        before = self._rows.get(id, row)
        twice = id in self._rows and "PARDEMO_HEADLESS" in os.environ
        if twice or before["statement"] != row["statement"]:
            raise ValueError(f"the id {id} is taken, by {before['statement']!r}: {row['statement']!r} needs its own")
        self._rows[id] = row
        self._write()

    def _write(self) -> None:
        project.write_json(self._path, self.rows)


def read(folder: str | Path | None = None) -> list[dict[str, Any]]:
    """All claims of a run's folder, in the order of the notebooks.

    Raises:
        FileNotFoundError: no run has written claims there.
        ValueError: a ledger that is not one.
    """
    folder = Path(folder or project.output_dir())
    files = sorted((folder / "claims").glob("*.json"))
    if not files:
        raise FileNotFoundError(f"no claims in {folder}: run `pardemo run` first, or name a run's folder")
    return [row for file in files for row in read_ledger(file)]


def read_ledger(file: Path) -> list[dict[str, Any]]:
    """The claims of one notebook; ValueError where the file is not such a ledger."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, list):
            raise TypeError("not a list")
        return [{name: row[name] for name in COLUMNS} for row in found]
    except (ValueError, KeyError, TypeError, IsADirectoryError) as error:
        raise ValueError(f"{file} is not a ledger of claims: {error}") from None


def agrees(row: dict[str, Any]) -> bool:
    """Whether a row's measurement is what it predicts, judged anew from the figures of the row."""
    return row["measured"] is not None and _agree(row["predicted"], row["measured"], row["rel"], row["relation"])


def follows(row: dict[str, Any]) -> bool:
    """Whether a row's verdict is what :meth:`Ledger.check` or :meth:`Ledger.skip` gives for its figures."""
    verdict, reason = row["verdict"], row["reason"]
    if row["measured"] is None:
        return verdict == "not measured" and bool(reason)
    if agrees(row):
        return verdict == "holds"
    if verdict == "differs":
        return reason.startswith(_AS_PREDICTED)
    return verdict == ("off" if _may_be_off(row["evidence"], reason) else "fails")


def statements() -> list[dict[str, str]]:
    """The article's statements: id, section, what it says, judgement (ok, if, no, doc), what is true, chapters."""
    with (Path(__file__).parent / "statements.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def frame(rows: Iterable[dict[str, Any]]):
    """A pandas table for readers: figures shortened, bounds with their sign, equalities with their tolerance."""
    import pandas as pd

    shown = [{**row, "predicted": predicted_text(row), "measured": short(row["measured"])} for row in rows]
    columns = ["id", "statement", "predicted", "measured", "unit", "evidence", "verdict"]
    if any(row["reason"] for row in shown):
        columns.append("reason")
    return pd.DataFrame(shown, columns=columns)


def predicted_text(row: dict[str, Any]) -> str:
    """The prediction as a table shows it, with its tolerance: ``4,194,304``, ``52.1 ± 1 %``, ``≤ 1e-06``."""
    bound, tolerance = {"at most": "≤ ", "at least": "≥ "}.get(row["relation"], ""), ""
    compared = isinstance(row["predicted"], (int, float)) and not isinstance(row["predicted"], bool)
    if compared and not bound and row["rel"]:
        tolerance = f" ± {100 * row['rel']:.3g} %"
    return bound + short(row["predicted"]) + tolerance


def short(value: Any) -> str:
    """A figure as a table shows it: 6,291,456, 0.0312, 1.2e-07, True."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def counts(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    found = [row["verdict"] for row in rows]
    return {verdict: found.count(verdict) for verdict in VERDICTS}


def _may_be_off(evidence: str, reason: str) -> bool:
    """Seconds depend on the machine, and a paper's figure may be missed for a reason that is told."""
    return evidence in ("time", "paced") or (evidence == "published" and bool(reason))


def _plain(value: Any) -> float | int | bool | str:
    """Numbers of numpy and torch become Python's: a ledger is JSON."""
    if isinstance(value, (bool, str)):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (bool, int)):
        return value
    if not isinstance(value, float):
        raise ValueError(f"a claim compares numbers, truths or texts, not {type(value).__name__}")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _agree(predicted: Any, measured: Any, rel: float, relation: str) -> bool:
    texts = isinstance(predicted, str) or isinstance(measured, str)
    if relation != "equal" and texts:
        raise ValueError("a bound needs numbers on both sides")
    if texts or isinstance(predicted, bool) or isinstance(measured, bool):
        return type(predicted) is type(measured) and predicted == measured
    if not math.isfinite(measured) or (relation == "equal" and not math.isfinite(predicted)):
        return False
    if relation == "at most":
        return measured <= predicted
    if relation == "at least":
        return measured >= predicted
    return abs(measured - predicted) <= rel * abs(predicted)
