"""What ``--pace`` says, on a screen."""

from pardemo.measure.summary import Paced, Summary
from pardemo.tables import text_table


def lines(measured: Summary) -> str:
    """The step as it would be, by rank; beside a run whose layers waited, the same by arithmetic. Empty without one."""
    paced = measured.paced
    if paced is None:
        return ""
    if paced.layer_s:
        return f"{heading(paced).upper()}  {sentence(measured, paced)}"
    table: list[tuple[str, ...]] = [
        ("", "rank", "step ms", "computes", "waits for bytes", "hides", "waits for ranks", "launches")
    ]
    for one in paced.time:
        row = (one.step_s, one.compute_s, one.exposed_s, one.hidden_s, one.idle_s, one.other_s)
        table.append(("", str(one.rank), *(f"{1e3 * seconds:.2f}" for seconds in row)))
    head = f"ON {paced.on}  {sentence(measured, paced)}"
    return "\n".join([head, text_table(table), *(f"  assumed: {line}" for line in paced.told)])


def heading(paced: Paced) -> str:
    """``On H100``, or what waited."""
    return "Layers that wait" if paced.layer_s else f"On {paced.on}"


def sentence(measured: Summary, paced: Paced) -> str:
    """What a step takes so, and without communication."""
    ran = max(one.step_s for one in measured.time)
    reckoned, alone, ran_ms = (f"{1e3 * seconds:,.2f}" for seconds in (paced.step_s, paced.alone_s, ran))
    if paced.layer_s:
        return (
            f"each takes {1e3 * paced.layer_s:g} ms forward and twice that backward; by arithmetic, with all else at "
            f"no cost and these links, a step is {reckoned} ms, and {alone} without communication; it took {ran_ms}"
        )
    return (
        "reckoned, not run: this step's operations at the planner's rates, its collectives as nccl sends them, "
        f"{paced.links}: {reckoned} ms, and {alone} without communication"
    )
