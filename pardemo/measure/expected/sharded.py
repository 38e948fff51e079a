"""Data parallel with shards on each rank: FSDP2, HSDP, FSDP1, DeepSpeed's stages."""

from pardemo.formulas import communication as formulas
from pardemo.measure.expected.rows import SMALL, low_precision, rows_of, shared
from pardemo.measure.parallelism import Parallelism
from pardemo.measure.places import NORM, ROOT
from pardemo.measure.summary import Finding, Row, Summary
from pardemo.tables import amount


def fsdp2(measured: Summary, fsdp: Parallelism) -> list[Finding]:
    """A unit of P bytes: gathered for the forward, once more for the backward where it was given back; P summed."""
    found = []
    n, m = len(fsdp.ranks), measured.micro_batches
    again = fsdp.options["reshard_after_forward"]
    gathers = [row for row in rows_of(measured, ["all-gather"], fsdp.ranks) if row.module in fsdp.unit_bytes]
    for unit, backward in dict.fromkeys((row.module, row.place.phase == "backward") for row in gathers):
        rows = [row for row in gathers if (row.module, row.place.phase == "backward") == (unit, backward)]
        wanted, calls = (0.0 if backward and not again[unit] else 1.0) * m, sum(row.calls for row in rows)
        for row in rows:
            once = formulas.ring_half(fsdp.unit_bytes[unit], n).sent
            row.expected_bytes = once * wanted * (row.calls / calls if calls else 1)
            row.why = f"{unit} gathered for the {'backward' if backward else 'forward'}"
            if row.place.phase == "between":
                row.why = f"{unit} gathered by unshard(), outside of all modules"
        if calls > wanted + 0.5:
            reason = _gathered_again(fsdp, unit, backward, calls / m, m, rows)
            found.append(Finding(
                f"{unit} is gathered {calls / m:g} times for the {'backward' if backward else 'forward'} of a "
                f"micro-batch where {wanted / m:g} would do{reason}", rows[0].line,
                sum(row.bytes for row in rows) - sum(row.expected_bytes or 0 for row in rows),
            ))  # fmt: skip
    _by_themselves(measured, fsdp)
    scatters = rows_of(measured, ["reduce-scatter"], fsdp.ranks)
    for row in scatters:
        if row.module in fsdp.unit_bytes:
            once = formulas.ring_half(fsdp.options["gradient_bytes"][row.module], n).sent
            whole = sum(other.bytes for other in scatters if other.module == row.module)
            times = 1 if whole < 1.5 * once else m  # set_requires_gradient_sync() adds micro-batches up on the rank
            # parts of a unit may go by themselves
            row.expected_bytes = times * once * (row.bytes / whole if whole else 1)
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


def _gathered_again(fsdp: Parallelism, unit: str, backward: bool, calls: float, m: int, rows: list[Row]) -> str:
    """Why a unit is gathered more often than once; empty where that is not known."""
    runs = fsdp.options.get("runs", {}).get(unit, 0) / m
    if any(row.place.phase == "between" for row in rows):
        return ": unshard() is called for it, and it was given back before its forward, or after it"
    if runs <= 1 or calls not in (runs, runs - 1):
        return ""
    if backward:
        return f": it runs {runs:g} times in its forward, and the backward of each run gives it back"
    advice = "set_reshard_after_forward(False) keeps it"
    return f": it runs {runs:g} times, and is given back after each (reshard_after_forward); {advice}"


def _by_themselves(measured: Summary, fsdp: Parallelism) -> None:
    """Gathers of a weight's shape that are no unit's: what is used as it is sharded is gathered by torch."""
    for row in rows_of(measured, ["all-gather"], fsdp.ranks):
        alike = [
            name
            for name, shape in fsdp.options.get("shapes", {}).items()
            if len(shape) > 1 and any(list(one) == shape for one in row.shapes)
        ]
        if alike and not row.why and row.module not in fsdp.unit_bytes and row.place.phase in ("forward", "backward"):
            some = " or ".join(alike[:2]) + (f", or {len(alike) - 2} more" if len(alike) > 2 else "")
            row.why = (
                f"of the shape of {some}: a sharded weight that is used outside of its module is gathered by itself"
            )


def fsdp1(measured: Summary, fsdp: Parallelism) -> list[Finding]:
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
        *shared(gathers, half * (1 if strategy == "SHARD_GRAD_OP" else 2) - kept, "parameters, gathered"),
        *shared(scatters, reduced, "gradients, reduced to their shards"),
    ]


def deepspeed(measured: Summary, zero: Parallelism) -> list[Finding]:
    """2Ψ, 2Ψ, (m + 1)Ψ, 3mΨ, all times (N−1)/N: ZeRO's own formulas, beside what DeepSpeed does."""
    stage, n, m = zero.options["stage"], len(zero.ranks), zero.options["micro_batches"]
    half = formulas.ring_half(sum(zero.unit_bytes.values()), n).sent
    name = f"ZeRO-{stage}" if stage else "DeepSpeed"
    summed = _of_deepspeed(measured, zero, ("all-reduce", "reduce-scatter", "reduce"))
    gathered = _of_deepspeed(measured, zero, ("all-gather", "broadcast"))
    whole = "its default sums all gradients whole (use_multi_rank_bucket_allreduce)" if stage in (1, 2) else ""
    kept = "parameters below stage3_param_persistence_threshold, and as many as stage3_max_live_parameters allows, "
    found = shared(summed, half * (2, 1, m, m)[stage], "gradients", f"{name}'s gradients", whole)
    if not stage:
        return found
    parameters = half * (2 * m if stage == 3 else 1)
    less = stage == 3 and sum(row.bytes for row in gathered) < parameters
    reason = kept + "stay gathered" if less else ""
    return found + shared(gathered, parameters, "parameters, gathered", f"{name}'s parameters", reason)


def _of_deepspeed(measured: Summary, zero: Parallelism, kinds: tuple[str, ...]) -> list[Row]:
    rows = rows_of(measured, kinds, zero.ranks)
    return [row for row in rows if row.bytes > SMALL and not row.place.objects and row.place.use != NORM]
