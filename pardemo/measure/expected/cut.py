"""Models that are cut over ranks: what their modules' shapes say beside what was sent."""

from collections.abc import Iterable
from math import prod
from typing import Any

from pardemo.measure.expected.rows import SMALL
from pardemo.measure.places import CONTEXT
from pardemo.measure.running_cut import PARAMETERS
from pardemo.measure.shapes_dtensor import REPLICATED
from pardemo.measure.summary import Finding, Row, Summary
from pardemo.tables import amount

#: How far what was sent may be from a formula that is met.
MET = 0.01
#: What calls carry of which no formula is known, by parallelism: where, and what.
CARRIED = {
    "TP": (("forward", "backward"), "activations between the parts of a cut layer"),
    "PP": (("forward", "backward", "between"), "activations, or their gradients, between stages"),
    "CP": (("forward", "backward"), "keys and values of other parts of the sequence, or their gradients"),
    "EP": (("forward", "backward"), "tokens on their way to experts, or back"),
    "DP": (("forward", "backward", "between", "step"), "gradients, or shards of parameters"),
}
#: Of a forward that a backward pass runs again.
RECOMPUTED = ", again: the forward is recomputed"
Term = dict[str, Any]


def by_terms(measured: Summary) -> list[Finding]:
    """Gives rows what the terms of all parallelisms make together; a row of several terms their sum.

    A term is met, or missed, with all rows that its shape fits: what one row is short of another may have.
    """
    terms = [term for one in measured.parallelism for term in one.options.get("terms", [])]
    rows = [
        row for row in measured.collectives if row.place.phase != "evaluation" and not row.place.objects and not row.why
    ]
    found = []
    for some, of_rows in _together([(term, [row for row in rows if _fits(term, row)]) for term in terms]):
        found += _held_against(measured, some, of_rows)
    for one in measured.parallelism:
        _carried(measured, one.kind, one.ranks, one.options.get("by", ""))
    return found


def _fits(term: Term, row: Row) -> bool:
    """Whether a row may be a term's: the same kind of call, in its group and phase, of a tensor of its size."""
    if row.kind != term["kind"] or row.ranks != tuple(term["ranks"]):
        return False
    phases = {"forward": ("forward", "between"), "backward": ("backward",)}  # a model's own hooks run after it
    if term["phase"] and row.place.phase not in phases[term["phase"]]:
        return False
    if row.place.repeated and not term["repeated"] and term["phase"]:
        return False
    whole, n = term["elements"], len(row.ranks)
    return not whole or any(prod(shape) in (whole, whole // n) for shape in row.shapes)


def _together(fits: list[tuple[Term, list[Row]]]) -> list[tuple[list[Term], list[Row]]]:
    """Terms that share rows, with those rows; terms without any are left out."""
    sets: list[tuple[list[Term], list[Row]]] = []
    for term, rows in fits:
        if not rows:
            continue
        ids = set(map(id, rows))
        joined = [one for one in sets if ids & set(map(id, one[1]))]
        sets = [one for one in sets if all(one is not other for other in joined)]
        terms = [t for one in joined for t in one[0]] + [term]
        unique = {id(row): row for one in joined for row in one[1]} | {id(row): row for row in rows}
        sets.append((terms, list(unique.values())))
    return sets


def _held_against(measured: Summary, terms: list[Term], rows: list[Row]) -> list[Finding]:
    """Expected bytes, and the reason where they differ, for rows that belong together."""
    whole, sent = sum(term["bytes"] for term in terms), sum(row.bytes for row in rows)
    vocabularies, found = measured.model.get("vocabularies", []), []
    if any(term["what"].startswith("outputs of") and term["width"] in vocabularies for term in terms):
        found.append(gathered_logits(rows[0], sent))
    for row in rows:
        row.expected_bytes = whole * row.bytes / sent if sent else whole / len(rows)
        own = [term for term in terms if _fits(term, row)]
        own = [term for term in own if term["repeated"] == row.place.repeated] or own
        row.why = "; ".join(dict.fromkeys(f"{term['what']}{RECOMPUTED if term['repeated'] else ''}" for term in own))
    if abs(sent - whole) > MET * whole:
        found += _shared_inputs(terms, rows, whole, sent)
        if not found:
            reason = _difference(measured, terms, rows, whole, sent)
            for row in rows:
                row.why += f": {reason}"
    for row in rows:
        row.why += "; small: it costs its latency" if 0 < row.bytes <= SMALL else ""
    return found


def _shared_inputs(terms: list[Term], rows: list[Row], whole: float, sent: float) -> list[Finding]:
    """Several layers that take one input, and each gather it, or sum its gradient; nothing where that is not why."""
    again = sum(term["again_bytes"] for term in terms)
    if not again or abs(sent - whole - again) > MET * (whole + again):
        return []
    same = {name: first for term in terms for name, first in term["same"].items()}
    once = [row for row in rows if row.module not in same]
    if abs(sum(row.bytes for row in once) - whole) <= MET * whole:
        for row in rows:
            row.expected_bytes = 0.0 if row.module in same else row.bytes
    for row in rows:
        if row.module in same:
            row.why += f": {same[row.module]} takes the same, and each does it for itself"
    layers = list(dict.fromkeys(name for pair in same.items() for name in reversed(pair)))
    some = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
    each = "gathers it" if rows[0].kind == "all-gather" else "sums its gradient"
    return [Finding(
        f"{some} share inputs, and each {each} for itself, {amount(sent)} a step where once for an input would be "
        f"{amount(whole)}: PrepareModuleInput on the module around them does it once", rows[0].line, sent - whole,
    )]  # fmt: skip


def _difference(measured: Summary, terms: list[Term], rows: list[Row], whole: float, sent: float) -> str:
    """Why more, or less, was sent than the formula says."""
    times, m = sent / whole if whole else 0.0, measured.micro_batches
    if all(term["what"] == REPLICATED for term in terms) and times > 1.5 and abs(times - round(times)) < MET:
        if all(row.place.phase == "step" for row in rows):
            return (
                f"{times:.0f} times, since they are sums of several ranks still when the optimizer steps, and each of "
                "its operations that needs them sums them anew"
            )
        if round(times) == m > 1:
            return f"after each of {m} micro-batches"
    if all(term["what"] == PARAMETERS for term in terms) and abs(times - terms[0]["optimizers"]) < MET:
        return f"{times:.0f} times, since each of the {times:.0f} chained optimizers has all of them gathered"
    return f"the formula says {amount(whole)} for all {amount(sent)}; why it differs is not known"


def gathered_logits(row: Row, nbytes: float) -> Finding:
    """What there is to say of logits that are gathered whole."""
    times = "once" if row.calls == 1 else f"{row.calls:.2g} times"
    return Finding(
        f"logits are gathered whole, {times} a step: a figure of them can be counted on each rank, a loss be "
        "computed where the vocabulary is cut, and a few numbers sent", row.line, nbytes,
    )  # fmt: skip


def _carried(measured: Summary, kind: str, ranks: Iterable[int], by: str) -> None:
    """Calls of more than a few bytes that no formula has: what they carry."""
    if kind not in CARRIED:
        return
    phases, what = CARRIED[kind]
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
    for row in measured.collectives:
        within = row.kind == "send" and kind in ("PP", "CP") and set(row.ranks) <= set(ranks)
        if not within and (row.kind not in kinds or row.ranks != tuple(ranks)):
            continue
        if kind == "CP" and by == "torch" and row.place.use != CONTEXT:
            continue
        if row.place.phase in phases and row.bytes > SMALL and not row.why:
            row.why = what
