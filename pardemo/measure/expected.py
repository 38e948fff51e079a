"""What the formulas of each parallelism say beside what was sent."""

from collections.abc import Iterable

from pardemo.formulas import communication as formulas
from pardemo.measure.places import ROOT
from pardemo.measure.running import Parallelism
from pardemo.measure.summary import Finding, Row, Summary
from pardemo.tables import amount

#: Bytes up to which a message's time is its latency's, whatever the link.
SMALL = 4096


def of(measured: Summary, parallelism: Parallelism) -> list[Finding]:
    """Gives the rows of a parallelism what was expected of them; what differs, and what would send less, is found."""
    kind = parallelism.kind
    if kind == "DDP":
        return _ddp(measured, parallelism)
    if kind in ("FSDP2", "HSDP"):
        return _fsdp2(measured, parallelism)
    if kind == "FSDP1":
        return _fsdp1(measured, parallelism)
    if kind.startswith("DeepSpeed"):
        return _deepspeed(measured, parallelism)
    if kind in WHY:
        _told(measured, parallelism)
    return []


#: Parallelisms whose bytes follow from shapes that only the script knows: what their calls carry.
WHY = {
    "TP": "activations between the parts of a cut layer",
    "PP": "activations, and their gradients, between stages",
    "CP": "keys and values of other parts of the sequence",
    "EP": "tokens on their way to experts, and back",
    "DP": "gradients, or shards of parameters",
}


def rows_of(measured: Summary, kinds: Iterable[str], ranks: tuple[int, ...]) -> list[Row]:
    """A group's rows of these kinds, without those of an evaluation: no formula of a step is for them."""
    of_group = [row for row in measured.collectives if row.kind in kinds and row.ranks == ranks]
    return [row for row in of_group if row.place.phase != "evaluation"]


def low_precision(measured: Summary) -> str:
    """The dtype of 16 bits in which autocast computes, if one does."""
    return next((dtype for dtype in measured.model["computed_in"] if dtype in ("bfloat16", "float16")), "")


def _ddp(measured: Summary, ddp: Parallelism) -> list[Finding]:
    """2S(N−1)/N a step, once, whatever the number of micro-batches."""
    found = []
    whole, n = sum(ddp.unit_bytes.values()), len(ddp.ranks)
    once = formulas.ring_all_reduce(whole, n).sent
    rows = [row for row in rows_of(measured, ["all-reduce"], ddp.ranks) if row.place.phase == "backward"]
    sent = sum(row.bytes for row in rows)
    line = rows[0].line if rows else ""
    for row in rows:
        row.why = "gradients, summed in buckets" + (f" as {row.dtype}" if row.dtype != "float32" else "")
    if ddp.options.get("models", 1) > 1:
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
    for name, (used, rows_) in ddp.options["rows_used"].items():
        nbytes = ddp.unit_bytes.get(name, 0)
        if used < 0.5 * rows_ and nbytes > 0.1 * whole:
            found.append(Finding(
                f"{name} is summed whole, {nbytes / whole:.0%} of all gradients, though a step touches {used:,} of its "
                f"{rows_:,} rows", line, formulas.ring_all_reduce(nbytes, n).sent,
            ))  # fmt: skip
    if unused := ddp.options["unused"]:
        nbytes = sum(ddp.unit_bytes.get(name, 0) for name in unused)
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        found.append(Finding(
            f"in the last step no gradient reached {names}, and zeros were summed: if that is always so, freeze them",
            line, formulas.ring_all_reduce(nbytes, n).sent,
        ))  # fmt: skip
    return found


def _fsdp2(measured: Summary, fsdp: Parallelism) -> list[Finding]:
    """A unit of P bytes: gathered for the forward, once more for the backward where it was given back; P summed."""
    found = []
    n, m = len(fsdp.ranks), measured.micro_batches
    again = fsdp.options["reshard_after_forward"]
    gathers = [row for row in rows_of(measured, ["all-gather"], fsdp.ranks) if row.module in fsdp.unit_bytes]
    for row in gathers:
        unit, forward = row.module, row.place.phase == "forward"
        wanted = (1.0 if forward or again[unit] else 0.0) * m
        row.expected_bytes = formulas.ring_half(fsdp.unit_bytes[unit], n).sent * wanted
        row.why = f"{unit} gathered for the {row.place.phase}"
        if row.calls > wanted + 0.5:
            found.append(Finding(
                f"{unit} is gathered {row.calls / m:g} times for the {row.place.phase} of a micro-batch where "
                f"{wanted / m:g} would do", row.line, row.bytes - row.expected_bytes,
            ))  # fmt: skip
    for row in rows_of(measured, ["reduce-scatter"], fsdp.ranks):
        if row.module in fsdp.unit_bytes:
            row.expected_bytes = formulas.ring_half(fsdp.options["gradient_bytes"][row.module], n).sent * m
            row.why = f"gradients of {row.module}"
    sent = sum(row.bytes for row in gathers)
    if m > 1 and gathers:
        found.append(Finding(
            f"parameters are gathered anew for each of {m} micro-batches, {amount(sent)} a step: fewer, larger "
            "micro-batches send less; set_reshard_after_backward(False) keeps them gathered until the last",
            gathers[0].line, sent * (m - 1) / m,
        ))  # fmt: skip
    low = low_precision(measured)
    if low and "float32" in fsdp.options["gathered_in"]:
        found.append(Finding(
            f"parameters are gathered as float32 though the forward is computed in {low}: "
            f"MixedPrecisionPolicy(param_dtype=torch.{low}) gathers half", gathers[0].line if gathers else "", sent / 2,
        ))  # fmt: skip
    for replicas in fsdp.options["replicas"]:
        for row in rows_of(measured, ["all-reduce"], replicas):
            if row.place.phase == "backward" and row.module in fsdp.unit_bytes:
                shard = fsdp.options["gradient_bytes"][row.module] / n
                row.expected_bytes = formulas.ring_all_reduce(shard, len(replicas)).sent * m
                row.why = f"shards of gradients of {row.module}, summed over the replicas"
    return found


def _fsdp1(measured: Summary, fsdp: Parallelism) -> list[Finding]:
    """3Ψ(N−1)/N for each micro-batch: gathered for the forward and for the backward, reduced once."""
    strategy = fsdp.options["sharding_strategy"]
    n, m = len(fsdp.ranks), measured.micro_batches
    half = formulas.ring_half(sum(fsdp.unit_bytes.values()), n).sent * m
    reduced = formulas.ring_half(sum(fsdp.options["gradient_bytes"].values()), n).sent * m
    # the root's parameters stay gathered from the forward to the backward
    kept = formulas.ring_half(fsdp.unit_bytes.get(ROOT, 0), n).sent * m if strategy == "FULL_SHARD" else 0
    gathers = rows_of(measured, ["all-gather"], fsdp.ranks)
    scatters = rows_of(measured, ["reduce-scatter"], fsdp.ranks)
    return [
        *_shared(gathers, half * (1 if strategy == "SHARD_GRAD_OP" else 2) - kept, "parameters, gathered"),
        *_shared(scatters, reduced, "gradients, reduced to their shards"),
    ]


def _deepspeed(measured: Summary, zero: Parallelism) -> list[Finding]:
    """2Ψ, 2Ψ, (m + 1)Ψ, 3mΨ, all times (N−1)/N: ZeRO's own formulas, beside what DeepSpeed does."""
    stage, n, m = zero.options["stage"], len(zero.ranks), zero.options["micro_batches"]
    whole = sum(zero.unit_bytes.values())
    once = formulas.zero_step(whole, n, stage, m, element_bytes=1)
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "reduce", "broadcast")
    rows = [row for row in rows_of(measured, kinds, zero.ranks) if row.bytes > SMALL and not row.place.objects]
    sent = sum(row.bytes for row in rows)
    if stage in (1, 2):
        reason = "its default sums all gradients whole (use_multi_rank_bucket_allreduce), then gathers parameters"
    elif sent < once:
        reason = (
            "parameters below stage3_param_persistence_threshold, and as many as stage3_max_live_parameters allows, "
        )
        reason += "stay gathered"
    else:
        reason = ""
    return _shared(rows, once, "DeepSpeed's gradients and parameters", f"ZeRO-{stage}", reason)


def _shared(rows: list[Row], whole: float, why: str, name: str = "", reason: str = "") -> list[Finding]:
    """What several rows are expected to send together, told by their shares; a finding where they do not."""
    sent = sum(row.bytes for row in rows)
    for row in rows:
        row.expected_bytes = whole * row.bytes / sent if sent else None
        row.why = why
    if not rows or not whole or abs(sent / whole - 1) < 0.05:
        return []
    named = f"{name or why}: its formula says {amount(whole)} a step, {amount(sent)} were sent"
    return [Finding(f"{named}: {reason}" if reason else named, rows[0].line, max(sent - whole, 0.0))]


def _told(measured: Summary, parallelism: Parallelism) -> None:
    """A group's calls of more than a few bytes, where the formula needs shapes: what they carry."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
    for row in measured.collectives:
        within = row.kind == "send" and parallelism.kind in ("PP", "CP") and set(row.ranks) <= set(parallelism.ranks)
        if (within or (row.kind in kinds and row.ranks == parallelism.ranks)) and row.bytes > SMALL and not row.why:
            row.why = WHY[parallelism.kind]
