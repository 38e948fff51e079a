"""What ``--full-size`` says, on a screen."""

from pardemo.measure.summary import Summary
from pardemo.tables import amount, text_table


def lines(measured: Summary) -> str:
    """The planned bytes by kind beside the measured ones, what was taken over and assumed; empty without a question."""
    full = measured.memory.get("full_size")
    if full is None:
        return ""
    what = f"\nAT FULL SIZE  {full['model']} on {full['gpus']:,} GPU{'s' * (full['gpus'] != 1)}"
    if full["peak_bytes"] is None:
        return f"{what}: no plan, since {full['why_not']}"
    table: list[tuple[str, ...]] = [("", "kind", "here, at the peak", "here, at most", "planned")]
    for kind in dict.fromkeys((*full["measured"], *full["kinds"])):
        here, planned = full["measured"].get(kind), full["kinds"].get(kind)
        if planned or (here and here["most"]):
            cells = ("", "") if here is None else (amount(here["peak"]), amount(here["most"]))
            table.append(("", kind, *cells, "" if planned is None else amount(planned)))
    head = f"{what}, {full['layout']}: {amount(full['peak_bytes'])} a GPU, planned and not measured"
    told = [f"  {'; '.join(full['taken_over'])}", f"  assumed: {'; '.join(full['assumed'])}", f"  {full['command']}"]
    return "\n".join([head, text_table(table), *told])
