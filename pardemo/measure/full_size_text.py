"""What ``--full-size`` says, on a screen."""

from typing import Any

from pardemo.measure.summary import Summary
from pardemo.tables import amount, text_table

COLUMNS = ("kind", "here, at the peak", "here, at most", "planned")


def lines(measured: Summary) -> str:
    """The planned bytes by kind beside the measured ones, what was taken over and assumed; empty without a question."""
    full = measured.memory.get("full_size")
    if full is None:
        return ""
    if full["peak_bytes"] is None:
        return f"\nAT FULL SIZE  {head(full)}"
    table = text_table([("", *COLUMNS), *(("", *row) for row in rows(full))])
    told = [f"  {'; '.join(full['taken_over'])}", f"  assumed: {'; '.join(full['assumed'])}", f"  {full['command']}"]
    return "\n".join([f"\nAT FULL SIZE  {head(full)}", table, *told])


def head(full: dict[str, Any]) -> str:
    """What is planned of which model; or why nothing is."""
    what = f"{full['model']} on {full['gpus']:,} GPU{'s' * (full['gpus'] != 1)}"
    if full["peak_bytes"] is None:
        return f"{what}: no plan, since {full['why_not']}"
    return f"{what}, {full['layout']}: {amount(full['peak_bytes'])} a GPU, planned and not measured"


def rows(full: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """By kind, of :data:`COLUMNS`."""
    made = []
    for kind in dict.fromkeys((*full["measured"], *full["kinds"])):
        here, planned = full["measured"].get(kind), full["kinds"].get(kind)
        if planned or (here and here["most"]):
            cells = ("", "") if here is None else (amount(here["peak"]), amount(here["most"]))
            made.append((kind, *cells, "" if planned is None else amount(planned)))
    return made
