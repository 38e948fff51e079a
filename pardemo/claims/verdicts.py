"""Verdicts on predictions and measurements, and figures as tables show them."""

import math
from typing import Any, TypedDict

EVIDENCE = {
    "wire": "bytes counted by the kernel",
    "memory": "bytes of tensors, followed one by one",
    "numeric": "results compared",
    "count": "operations counted",
    "time": "seconds on this machine",
    "host links": "seconds over links that the kernel limits: each host a network namespace",
    "paced links": "seconds over connections that the kernel paces",
    "paced": "seconds, where a wait stands for computation",
    "arithmetic": "recomputed only",
    "published": "figures of a paper, compared",
}
VERDICTS = ("holds", "differs", "not measured", "off", "fails")
#: Evidence that depends on the machine.
SECONDS = ("time", "host links", "paced links", "paced")
#: How a row's reason begins that differs, and is right as something else predicts.
AS_PREDICTED = "measured as"


class ClaimRow(TypedDict):
    """One case of a claim, as a ledger's JSON and a run's ``claims.csv`` have it; what is not said is empty."""

    id: str  #: the claim's, and behind it the case's: ``s30.rows_first.n4``
    notebook: str
    statement: str
    source: str  #: the paper's section or table that says it
    predicted: Any  #: a number, truth or text in the claim's unit; None of what was not measured, as ``measured``
    measured: Any
    unit: str
    rel: float  #: the tolerance relative to ``predicted``
    evidence: str  #: of :data:`EVIDENCE`
    verdict: str  #: of :data:`VERDICTS`
    reason: str  #: why it is not as predicted, or was not measured
    relation: str  #: ``equal``, ``at most``, ``at least``
    claim: str  #: the claim's id
    case: str  #: as ``N = 4``
    because: str  #: why the tolerance is what it is


COLUMNS = tuple(ClaimRow.__annotations__)


def agree(predicted: Any, measured: Any, rel: float, relation: str) -> bool:
    """Whether a measurement is what was predicted; :meth:`pardemo.Ledger.check` says what that means.

    Raises:
        ValueError: a bound on something that has no order.
    """
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


def may_be_off(evidence: str, reason: str) -> bool:
    """Whether a miss is *off* and no failure: seconds, and a paper's figure that is missed for a given reason."""
    return evidence in SECONDS or (evidence == "published" and bool(reason))


def agrees(row: ClaimRow) -> bool:
    """Whether a row's measurement is what it predicts, judged anew from the figures of the row."""
    return row["measured"] is not None and agree(row["predicted"], row["measured"], row["rel"], row["relation"])


def follows(row: ClaimRow) -> bool:
    """Whether a row's verdict is what a :class:`pardemo.Ledger` gives for its figures."""
    verdict, reason = row["verdict"], row["reason"]
    if row["measured"] is None:
        return verdict == "not measured" and bool(reason)
    if agrees(row):
        return verdict == "holds"
    if verdict == "differs":
        return reason.startswith(AS_PREDICTED)
    return verdict == ("off" if may_be_off(row["evidence"], reason) else "fails")


def plain(value: Any) -> float | int | bool | str:
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


def predicted_text(row: ClaimRow) -> str:
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
