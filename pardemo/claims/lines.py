"""Claims as a reader sees them: a line each, and a chapter's closing."""

import html
import re
from collections.abc import Iterable, Sequence

from pardemo.claims.verdicts import AS_PREDICTED, VERDICTS, ClaimRow, predicted_text, short

#: Sign and colour of a verdict. A rendered page has shades of its own for a light and a dark screen; JupyterLab, which
#: knows none of them, gets one that is readable on both.
SIGNS = {
    "holds": ("✓", "var(--holds, #2f9e44)"),
    "differs": ("≠", "var(--differs, #d9730d)"),
    "off": ("≈", "var(--off, #868e96)"),
    "not measured": ("–", "var(--off, #868e96)"),
    "fails": ("✗", "var(--fails, #e03131)"),
}
#: What a reader sees who points at a sign.
MEANINGS = {
    "holds": "holds: measured as predicted, within the tolerance",
    "differs": "differs: not as predicted; a second prediction holds, and the reason is given",
    "off": "off: seconds, or a paper's figure, that the prediction misses; the chapter says why",
    "not measured": "not measured: this machine cannot, and the reason is given",
    "fails": "fails: a mistake, and the chapter stops",
}
FEW = 8  # cases that are shown; where there are more, their range is, and they are folded
IN_A_LINE = 3  # cases that a line has room for, on a phone too: more are a table below the sentence
NOTICED = 0.001  # a tolerance below a tenth of a per cent
SHORT = 40  # characters of the values that hold instead: where they are more, the cases alone show them


class Line:
    """One claim with its cases, as HTML for notebooks and as text for terminals.

    Args:
        rows: the ledger's rows of one claim, at least one.
    """

    def __init__(self, rows: Sequence[ClaimRow]):
        self._rows = list(rows)

    def __repr__(self) -> str:
        sign, _ = SIGNS[worst(self._rows)]
        head = [f"{sign} {_said(self._rows)}: {_figures(self._rows)}  [{self._rows[0]['claim']}]"]
        return "\n".join([*head, *(f"  {sentence}" for sentence in sentences(self._rows))])

    def _repr_html_(self) -> str:
        rows, verdict = self._rows, worst(self._rows)
        sign, colour = SIGNS[verdict]
        first = rows[0]
        hint = "; ".join(filter(None, (first["because"], first["source"], first["evidence"], first["claim"])))
        measured = [row for row in rows if row["measured"] is not None]
        as_table = IN_A_LINE < len(measured) <= FEW and len({short(row["measured"]) for row in measured}) > 1
        figures = _cases(measured) if as_table else f": {_figures(rows, bold=True)}"
        head = (
            f'<span style="color:{colour};font-weight:bold" title="{MEANINGS[verdict]}">{sign}</span> '
            f'<span title="{html.escape(hint, quote=True)}">{html.escape(_said(rows))}</span>{figures}'
        )
        below = "".join(f'<div style="margin-left:1.4em;opacity:.85">{html.escape(s)}</div>' for s in sentences(rows))
        if len(rows) > FEW:
            head = f"<details><summary>{head}</summary>{_table(rows)}</details>"
        return f'<div class="claim" data-claim="{first["claim"]}" style="margin:.15em 0">{head}{below}</div>'


class Closing:
    """A chapter's claims at its end: the counts, the sentences of those not as predicted, and all of it folded."""

    def __init__(self, rows: Sequence[ClaimRow]):
        self._rows = list(rows)
        self._claims = list(by_claim(rows).values())

    def __repr__(self) -> str:
        odd = [repr(Line(rows)) for rows in self._claims if worst(rows) != "holds"]
        return "\n".join([summary(self._rows), *odd])

    def _repr_html_(self) -> str:
        odd = "".join(_sentence(rows) for rows in self._claims if worst(rows) != "holds")
        table = f"<details><summary>all of them</summary>{_table(self._rows)}</details>" if self._rows else ""
        return f'<div class="claims"><p><b>{html.escape(summary(self._rows))}</b></p>{odd}{table}</div>'


def _sentence(rows: Sequence[ClaimRow]) -> str:
    """A claim by its sign and its sentence: figures and reason stand where it was measured."""
    sign, colour = SIGNS[worst(rows)]
    return f'<div><span style="color:{colour};font-weight:bold">{sign}</span> {html.escape(_said(rows))}</div>'


def summary(rows: Sequence[ClaimRow]) -> str:
    """``37 claims in 62 cases: 35 hold, 2 differ.``"""
    if not rows:
        return "No claim yet."
    verdicts = [worst(booked) for booked in by_claim(rows).values()]
    cases = f" in {len(rows)} cases" if len(rows) != len(verdicts) else ""
    plural = {"holds": "hold", "differs": "differ", "fails": "fail"}
    counts = [
        f"{n} {verdict if n == 1 else plural.get(verdict, verdict)}"
        for verdict in VERDICTS
        if (n := verdicts.count(verdict))
    ]
    return f"{len(verdicts)} claim{'s' if len(verdicts) != 1 else ''}{cases}: {', '.join(counts)}."


def by_claim(rows: Iterable[ClaimRow]) -> dict[str, list[ClaimRow]]:
    """The rows of each claim, by its id, in their order."""
    rows_by_claim: dict[str, list[ClaimRow]] = {}
    for row in rows:
        rows_by_claim.setdefault(row["claim"], []).append(row)
    return rows_by_claim


def _said(rows: Sequence[ClaimRow]) -> str:
    """A claim's sentence without its full stop: its figures follow."""
    return rows[0]["statement"].removesuffix(".")


def worst(rows: Iterable[ClaimRow]) -> str:
    """A claim's verdict is that of its worst case."""
    return max((row["verdict"] for row in rows), key=VERDICTS.index)


def _figures(rows: list[ClaimRow], bold: bool = False) -> str:
    """``predicted 8 φ ± 1 %, measured 8.00 (N = 2), 8.01 (N = 4)``, shortened where that says as much."""
    measured = [row for row in rows if row["measured"] is not None]
    if not measured:
        return "not measured"
    if all(row["measured"] is row["predicted"] is True for row in measured):
        cases = "; ".join(row["case"] for row in measured if row["case"])
        return f"yes ({cases})" if cases else "yes"
    plain = html.escape if bold else str

    def figure(row: ClaimRow) -> str:
        text = plain(short(row["measured"]))
        return (f"<b>{text}</b>" if bold else text) + plain(_unit(row))

    if len(measured) > FEW:
        return f"{len(measured)} cases, {plain(_spread(measured))}"
    if len({predicted_text(row) for row in measured}) == 1:
        head = f"{plain(_prediction(measured[0]))}, {_figure_word(measured[0])} "
        if len(measured) > 1 and len({short(row["measured"]) for row in measured}) == 1:
            return head + f"{figure(measured[0])} ({'; '.join(plain(row['case']) for row in measured)})"
        return head + ", ".join(figure(row) + (f" ({plain(row['case'])})" if row["case"] else "") for row in measured)
    return "; ".join(
        (f"{plain(row['case'])}: " if row["case"] else "")
        + f"{plain(_prediction(row))}, {_figure_word(row)} {figure(row)}"
        for row in measured
    )


def _figure_word(row: ClaimRow) -> str:
    """The word before the figure beside a prediction: measured, computed, or published by a paper.

    Where published figures have a bound, the figure was computed from them, such as how far a model misses them.
    """
    if row["evidence"] == "published":
        return "published" if row["relation"] == "equal" else "found"
    return "computed" if row["evidence"] == "arithmetic" else "measured"


def _unit(row: ClaimRow) -> str:
    return f" {row['unit']}" if row["unit"] else ""


def _prediction(row: ClaimRow) -> str:
    """``predicted 8 φ ± 1 %``, ``at most 1e-05``; a tolerance that no reader would notice is left to the table."""
    figure = short(row["predicted"]) + _unit(row)
    return f"predicted {figure}{_tolerance(row)}" if row["relation"] == "equal" else f"{row['relation']} {figure}"


def _tolerance(row: ClaimRow) -> str:
    """`` ± 1 %``; nothing of 0, of a bound, and where no reader would notice it."""
    noticed = row["relation"] == "equal" and row["rel"] >= NOTICED and row["predicted"]
    return f" ± {100 * row['rel']:.3g} %" if noticed else ""


def _spread(rows: list[ClaimRow]) -> str:
    pairs = [(row["predicted"], row["measured"]) for row in rows if row["relation"] == "equal"]
    numbers = [(p, m) for p, m in pairs if not isinstance(p, (bool, str)) and not isinstance(m, (bool, str)) and p]
    if len(numbers) == len(rows):
        ratios = [m / p for p, m in numbers]
        low, high = f"{min(ratios):.4g}", f"{max(ratios):.4g}"
        if low == high:
            return "each as predicted" if low == "1" else f"measured over predicted {low} in each"
        return f"measured over predicted {low} to {high}"
    if not pairs:
        values = [row["measured"] for row in rows]
        return f"{_prediction(rows[0])}, measured {short(min(values))} to {short(max(values))}"
    return ", ".join(f"{n} {verdict}" for verdict in VERDICTS if (n := [r["verdict"] for r in rows].count(verdict)))


def sentences(rows: list[ClaimRow]) -> list[str]:
    """The reasons of the cases that are not as predicted; a reason that several cases share comes once."""
    values_by_sentence: dict[str, list[str]] = {}  # sentence -> the values that hold instead of the prediction
    bounds = {}  # sentence -> what kind of prediction it is: equal, at most, at least
    for row in rows:
        if row["verdict"] != "holds" and row["reason"]:
            instead = re.fullmatch(rf"{AS_PREDICTED} (.+?) predicts: (.+)", row["reason"], re.DOTALL)
            value, sentence = instead.groups() if instead else ("", row["reason"])
            values = values_by_sentence.setdefault(sentence, [])
            bounds[sentence] = row["relation"]
            if value and value not in values:
                values.append(value)
    return [_sentence_text(cause, " and ".join(values), bounds[cause]) for cause, values in values_by_sentence.items()]


def _sentence_text(sentence: str, values: str, relation: str) -> str:
    holds = f"It is {values} instead" if relation == "equal" else f"{relation} {values} holds instead"
    text = f"{holds}: {sentence}" if 0 < len(values) <= SHORT else sentence
    return text[0].upper() + text[1:] + "." * (text[-1] not in ".!?")


def _cases(rows: Sequence[ClaimRow]) -> str:
    """The cases of one claim as a small table: prediction, tolerance and unit once where all cases share them."""
    unit = _unit(rows[0]) if len({_unit(row) for row in rows}) == 1 else ""
    tolerance = _tolerance(rows[0]) if len({_tolerance(row) for row in rows}) == 1 else ""
    common = html.escape(_prediction(rows[0])) if len({_prediction(row) for row in rows}) == 1 else ""
    heads = ["", *([] if common else [f"predicted{unit}{tolerance}"]), f"{_figure_word(rows[0])}{unit}"]
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = ""
    for row in rows:
        predicted = _prediction(row).removeprefix("predicted ").removesuffix(tolerance).removesuffix(unit)
        measured = f"<b>{html.escape(short(row['measured']))}</b>{html.escape(_unit(row).removesuffix(unit))}"
        cells = [html.escape(row["case"]), *([] if common else [html.escape(predicted)]), measured]
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f'{": " if common else ""}{common}<table style="margin:.2em 0 .2em 1.4em"><tr>{head}</tr>{body}</table>'


def _table(rows: Iterable[ClaimRow]) -> str:
    heads = "".join(f"<th>{head}</th>" for head in ("claim", "case", "predicted", "measured", "evidence", ""))
    lines, before = [], ""
    for row in rows:
        claim_cell = f"{html.escape(row['statement'])} <small>{row['claim']}</small>" if row["claim"] != before else ""
        before = row["claim"]
        measured = short(row["measured"]) + (f" {row['unit']}" if row["unit"] and row["measured"] is not None else "")
        sign, colour = SIGNS[row["verdict"]]
        cells = (claim_cell, *map(html.escape, (row["case"], predicted_text(row), measured, row["evidence"])))
        mark = f'<td style="color:{colour}" title="{MEANINGS[row["verdict"]]}">{sign}</td>'
        lines.append(f'<tr id="{row["id"]}">' + "".join(f"<td>{cell}</td>" for cell in cells) + mark + "</tr>")
    return f"<table><tr>{heads}</tr>{''.join(lines)}</table>"
