"""What ``--pace`` says, on a screen."""

from pardemo.measure.summary import Summary
from pardemo.tables import text_table


def lines(measured: Summary) -> str:
    """The step as it would be, by rank; beside a run whose layers waited, the same by arithmetic. Empty without one."""
    paced = measured.paced
    if paced is None:
        return ""
    figures = [max(one.step_s for one in measured.time), paced.step_s, paced.alone_s]
    if paced.layer_s:
        ran, reckoned, alone = (f"{1e3 * seconds:,.1f}" for seconds in figures)
        return (
            f"LAYERS THAT WAIT  each takes {1e3 * paced.layer_s:g} ms forward and twice that backward; by arithmetic, "
            f"with all else at no cost and these links, a step is {reckoned} ms, and {alone} without communication; "
            f"it took {ran}"
        )
    table: list[tuple[str, ...]] = [
        ("", "rank", "step ms", "computes", "waits for bytes", "hides", "waits for ranks", "launches")
    ]
    for one in paced.time:
        row = (one.step_s, one.compute_s, one.exposed_s, one.hidden_s, one.idle_s, one.other_s)
        table.append(("", str(one.rank), *(f"{1e3 * seconds:.2f}" for seconds in row)))
    head = (
        f"ON {paced.on}  reckoned, not run: this step's operations at the planner's rates, its collectives as nccl "
        f"sends them, {paced.links}: {1e3 * paced.step_s:,.2f} ms, and {1e3 * paced.alone_s:,.2f} without communication"
    )
    return "\n".join([head, text_table(table), *(f"  assumed: {line}" for line in paced.told)])
