"""Data parallel with a whole model on each rank: torch's DDP."""

from pardemo.formulas import communication as formulas
from pardemo.measure.expected.rows import low_precision, rows_of
from pardemo.measure.parallelism import Parallelism
from pardemo.measure.summary import Finding, Summary
from pardemo.tables import amount


def ddp(measured: Summary, parallelism: Parallelism) -> list[Finding]:
    """2S(N−1)/N a step, once, whatever the number of micro-batches; for each evaluation of a closure."""
    found = []
    whole, n = sum(parallelism.unit_bytes.values()), len(parallelism.ranks)
    once = formulas.ring_all_reduce(whole, n).sent * measured.closures
    rows = [row for row in rows_of(measured, ["all-reduce"], parallelism.ranks) if row.place.phase == "backward"]
    for row in rows:
        if row.dtype == "int32":
            row.why = "which parameters were used, for find_unused_parameters"
    rows = [row for row in rows if row.dtype != "int32"]
    sent = sum(row.bytes for row in rows)
    line = rows[0].line if rows else ""
    buckets = _told(parallelism.options.get("buckets", []))
    for row in rows:
        row.why = "gradients, summed in buckets" + (f" as {row.dtype}" if row.dtype != "float32" else "") + buckets
    if parallelism.options.get("models", 1) > 1:
        return []
    for row in rows:
        row.expected_bytes = once * row.bytes / sent if sent else once
    m = measured.micro_batches
    if m > 1 and sent > 1.5 * once:
        found.append(Finding(
            f"gradients are summed after each of {m} micro-batches, {amount(sent)} a step where once would be "
            f"{amount(once)}: run all but the last forward and backward in `with model.no_sync():`", line, sent - once,
        ))  # fmt: skip
    low = low_precision(measured)
    if low and any(row.dtype == "float32" for row in rows):
        hook = "bf16_compress_hook" if low == "bfloat16" else "fp16_compress_hook"
        found.append(Finding(
            f"gradients travel as float32 though the forward is computed in {low}: `{hook}` would send half",
            line, once / 2,
        ))  # fmt: skip
    for name, (used, rows_) in parallelism.options["rows_used"].items():
        nbytes = parallelism.unit_bytes.get(name, 0)
        if used < 0.5 * rows_ and nbytes > 0.1 * whole:
            found.append(Finding(
                f"{name} is summed whole, {nbytes / whole:.0%} of all gradients, though a step touches {used:,} of its "
                f"{rows_:,} rows", line, formulas.ring_all_reduce(nbytes, n).sent,
            ))  # fmt: skip
    if parallelism.options.get("find_unused_parameters") and not parallelism.options["unused"]:
        found.append(Finding(
            "find_unused_parameters walks the graph after each forward, and all parameters were used: switch it off if "
            "that is always so", line, 0.0,
        ))  # fmt: skip
    if unused := parallelism.options["unused"]:
        nbytes = sum(parallelism.unit_bytes.get(name, 0) for name in unused)
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        found.append(Finding(
            f"in the last step no gradient reached {names}, and zeros were summed: if that is always so, freeze them",
            line, formulas.ring_all_reduce(nbytes, n).sent,
        ))  # fmt: skip
    return found


def _told(buckets: list[list[str]], most: int = 3) -> str:
    """Which parameters a bucket has: the first that it waits for, the last, and how many; of the first buckets."""
    some = [f"{one[0]} to {one[-1]} ({len(one)})" if len(one) > 1 else one[0] for one in buckets[:most]]
    more = f" and {len(buckets) - most} more buckets" if len(buckets) > most else ""
    return f": {', '.join(some)}{more}" if some else ""
