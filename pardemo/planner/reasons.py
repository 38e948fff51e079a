"""Why a row is recommended: each clause compares it with other rows, and is left out where it would not be true."""

from pardemo.planner.table import Plan, PlanRow, Request


def why(plan: Plan) -> str:
    """The recommendation in words."""
    return "nothing fits" if plan.best is None else "; ".join(_reasons(plan))


def _reasons(plan: Plan) -> list[str]:
    """The clauses for ``plan.best``: how fast, against other stages, other micro-batches, and what limits it."""
    return [_speed(plan), *_stage(plan), *_batch(plan), f"limited by {plan.best.time.limit}"]


def _speed(plan: Plan) -> str:
    room = f"{plan.request.cluster.room / 1e9:.1f} GB"
    quickest = min(row.hours for row in plan.eligible)
    if plan.best.hours == quickest:
        return f"the fastest that fits {room}"
    return f"within 1 % of the fastest that fits {room}, and offloads or shards less or takes less memory"


def _stage(plan: Plan) -> list[str]:
    """Lower stages do not fit, or are slower; without any, what higher ones send."""
    best = plan.best
    if best.stage is None:
        return []
    zero = [row for row in plan.rows if row.stage is not None]
    lower = [row for row in zero if row.stage < best.stage]
    fitting = [row for row in lower if row.fits]
    if fitting:
        nearest = min(fitting, key=lambda row: row.hours)
        if nearest.hours <= best.hours:  # as fast, but offloads
            return []
        return [f"below stage {best.stage} {_way(nearest)} is the fastest, which takes {_more(nearest, best)} longer"]
    if lower:
        return [f"below stage {best.stage} nothing fits"]
    higher = [row for row in zero if row.stage > best.stage and _same(row, best, "offload", "checkpointing", "batch")]
    if higher and all(row.time.sent_bytes >= best.time.sent_bytes for row in higher):
        return ["a higher stage would save memory that is not needed and send no less"]
    return []


def _batch(plan: Plan) -> list[str]:
    """The next smaller and the next larger micro-batch, all else equal."""
    best = plan.best
    alike = [row for row in plan.rows if _same(row, best, "engine", "offload", "checkpointing")]
    clauses = []
    smaller = max((row for row in alike if row.batch < best.batch), key=lambda row: row.batch, default=None)
    if smaller is not None and smaller.hours > best.hours:
        clauses.append(f"micro-batches of {smaller.batch} take {_more(smaller, best)} longer")
    larger = min((row for row in alike if row.batch > best.batch), key=lambda row: row.batch, default=None)
    if larger is not None and not larger.fits:
        clauses.append(f"micro-batches of {larger.batch} do not fit")
    elif larger is not None and larger.hours < best.hours:
        clauses.append(f"micro-batches of {larger.batch} are at most 1 % faster")
    return clauses


def _same(row: PlanRow, other: PlanRow, *names: str) -> bool:
    return all(getattr(row, name) == getattr(other, name) for name in names)


def _more(slower: PlanRow, row: PlanRow) -> str:
    return f"{100 * (slower.hours / row.hours - 1):.1f} %"


def _way(row: PlanRow) -> str:
    offload = "" if row.offload == "none" else f" with the {row.offload.replace('+', ' and ')} offloaded"
    return f"ZeRO {row.stage}{offload} at {row.batch} × {row.accumulation}"


def epochs(request: Request) -> str:
    """How often the steps go through the data."""
    if not request.epochs:
        return ""
    return f": {request.epochs:g} epoch{'' if request.epochs == 1 else 's'} of {request.rows:,}"


def beside(plan: Plan) -> str:
    """What is not usual of LoRA: frozen weights that are not in 16 bits, embedding and head that are trained."""
    from pardemo.planner.analytic import tuning_of
    from pardemo.planner.layouts.model import configurations
    from pardemo.planner.layouts.model.tuning import left_in_16_bits

    job = plan.request.job
    kept = "" if job.base == "bf16" else f", frozen weights in {job.base}"
    if left := left_in_16_bits(tuning_of(job), configurations.of(job.config)):
        kept += f", but {2 * left / 1e9:.1f} GB of experts in 16 bits, which bitsandbytes does not convert"
    return kept + (", embedding and head trained" if job.embeddings else "")
