"""Compares what was sent with each parallelism's formula, and finds what a reader would change in a script."""

import math
import statistics
from collections.abc import Iterable, Iterator
from math import prod

from pardemo.formulas.communication import ring_all_reduce, ring_half
from pardemo.script.runtime.call_sites import CONTEXT, NORM, ROOT
from pardemo.script.step.parallelism import (
    PARAMETERS,
    DdpOptions,
    Fsdp1Options,
    Fsdp2Options,
    Parallelism,
    ParallelismOptions,
    ZeroOptions,
)
from pardemo.script.step.shapes import REPLICATED, ExpectedTraffic
from pardemo.script.step.summary import CollectiveRow, StepFinding, Summary
from pardemo.script.words import first_of
from pardemo.tables import amount

#: Bytes up to which a message's time is its latency's, whatever the link.
SMALL_BYTES = 4096
#: Elements up to which a tensor is a metric, and no loss of each token.
METRIC = 16
#: A rank is late where it is the one that the others waited for, by this share of the step.
LATE = 0.15
LATE_S = 0.005  # ... and by this: a core that is shared, or a cold cache, makes one rank of equal ones this much slower
_REDUNDANCY = "ZeroRedundancyOptimizer"
_SUMMED = "as many bytes as all gradients have: summed by the script"
_SCATTERED = "as many bytes as all gradients, of which each rank gets its part"
_GATHERED = "as many bytes as all parameters, of which each rank has updated its part"
#: What rows are by their bytes alone -> the parallelism that they make.
BY_HAND = {_SUMMED: "data parallel", _SCATTERED: "data parallel with a sharded optimizer"}


def rows_of(summary: Summary, kinds: Iterable[str], ranks: tuple[int, ...]) -> list[CollectiveRow]:
    """Returns a group's rows of these kinds, without those of an evaluation, which no formula covers."""
    of_group = [row for row in summary.collectives if row.kind in kinds and row.ranks == ranks]
    return [row for row in of_group if row.site.phase != "evaluation"]


def low_precision(summary: Summary) -> str:
    """Returns the 16-bit dtype in which autocast computes, if one does."""
    return next((dtype for dtype in summary.model["computed_in"] if dtype in ("bfloat16", "float16")), "")


def bytes_of(rows: Iterable[CollectiveRow]) -> float:
    """Returns the bytes that rows send together."""
    return sum(row.bytes for row in rows)


def share_expected(rows: list[CollectiveRow], expected: float, why: str = "") -> None:
    """Divides a formula's bytes over rows in proportion to what each sent, and says what they are."""
    sent = bytes_of(rows)
    for row in rows:
        row.expected_bytes = expected * row.bytes / sent if sent else expected / len(rows)
        row.why = why or row.why


def expect_together(
    rows: list[CollectiveRow], expected: float, why: str, name: str = "", reason: str = ""
) -> Iterator[StepFinding]:
    """Compares what several rows sent together with a formula; adds a finding where they differ."""
    share_expected(rows, expected, why)
    sent = bytes_of(rows)
    if rows and expected and abs(sent / expected - 1) >= 0.05:
        named = f"{name or why}: the formula says {amount(expected)} a step, {amount(sent)} were sent"
        yield StepFinding(f"{named}: {reason}" if reason else named, rows[0].line, max(sent - expected, 0.0))


def ddp(summary: Summary, parallelism: Parallelism) -> Iterator[StepFinding]:
    """Expects of DDP 2S(N−1)/N a step, whatever the number of micro-batches, for each evaluation of a closure."""
    n, m, options = len(parallelism.ranks), summary.micro_batches, parallelism.options
    total = sum(parallelism.unit_bytes.values())
    once = ring_all_reduce(total, n).sent * summary.closures
    rows = []
    for row in rows_of(summary, ["all-reduce"], parallelism.ranks):
        if row.site.phase == "backward" and row.dtype == "int32":
            row.why = "which parameters were used, for find_unused_parameters"
        elif row.site.phase == "backward":
            rows.append(row)
            dtype = f" as {row.dtype}" if row.dtype != "float32" else ""
            row.why = f"gradients, summed in buckets{dtype}{_buckets_text(options)}"
    if not isinstance(options, DdpOptions):  # of several models whose bytes are whose is not to be seen
        return
    share_expected(rows, once)
    sent, line = bytes_of(rows), rows[0].line if rows else ""
    if m > 1 and sent > 1.5 * once:
        yield StepFinding(
            f"gradients are summed after each of {m} micro-batches, {amount(sent)} a step where once would be "
            f"{amount(once)}: run all but the last forward and backward in `with model.no_sync():`", line, sent - once,
        )  # fmt: skip
    low = low_precision(summary)
    if low and any(row.dtype == "float32" for row in rows):
        hook = "bf16_compress_hook" if low == "bfloat16" else "fp16_compress_hook"
        yield StepFinding(
            f"gradients travel as float32 though the forward is computed in {low}: `{hook}` would send half",
            line, once / 2,
        )  # fmt: skip
    for name, (used, rows_) in options.rows_used.items():
        nbytes = parallelism.unit_bytes.get(name, 0)
        if used < 0.5 * rows_ and nbytes > 0.1 * total:
            yield StepFinding(
                f"{name} is summed whole, {nbytes / total:.0%} of all gradients, though a step touches {used:,} of its "
                f"{rows_:,} rows", line, ring_all_reduce(nbytes, n).sent,
            )  # fmt: skip
    unused = options.unused
    if options.find_unused_parameters and not unused:
        yield StepFinding(
            "find_unused_parameters walks the graph after each forward, and all parameters were used: switch it off if "
            "that is always so", line,
        )  # fmt: skip
    if unused:
        yield StepFinding(
            f"in the last step no gradient reached {first_of(unused, 3)}, and zeros were summed: if that is always so, "
            "freeze them", line, ring_all_reduce(sum(parallelism.unit_bytes.get(name, 0) for name in unused), n).sent,
        )  # fmt: skip


def _buckets_text(options: ParallelismOptions) -> str:
    """Describes the first buckets: the first parameter that each waits for, the last, and their number."""
    buckets = options.buckets if isinstance(options, DdpOptions) else []
    texts = [f"{bucket[0]} to {bucket[-1]} ({len(bucket)})" if len(bucket) > 1 else bucket[0] for bucket in buckets]
    return f": {first_of(texts, 3, more=' and {} more buckets')}" if texts else ""


def fsdp2(summary: Summary, fsdp: Parallelism) -> Iterator[StepFinding]:
    """Expects of FSDP2 that a unit of P bytes is gathered forward, again backward if it was freed, and summed once."""
    options = fsdp.options
    assert isinstance(options, Fsdp2Options)
    n, m, units, gradients = len(fsdp.ranks), summary.micro_batches, fsdp.unit_bytes, options.gradient_bytes
    gathers = [row for row in rows_of(summary, ["all-gather"], fsdp.ranks) if row.module in units]
    for unit, backward in dict.fromkeys((row.module, row.site.phase == "backward") for row in gathers):
        rows = [row for row in gathers if (row.module, row.site.phase == "backward") == (unit, backward)]
        wanted = 0 if backward and not options.reshard_after_forward[unit] else m
        calls, phase = sum(row.calls for row in rows), "backward" if backward else "forward"
        for row in rows:
            row.expected_bytes = ring_half(units[unit], n).sent * wanted * (row.calls / calls if calls else 1)
            row.why = f"{unit} gathered for the {phase}"
            if row.site.phase == "between":
                row.why = f"{unit} gathered by unshard(), outside of all modules"
        if calls > wanted + 0.5:
            yield StepFinding(
                f"{unit} is gathered {calls / m:g} times for the {phase} of a micro-batch where {wanted / m:g} would do"
                f"{_gathered_again(options, unit, backward, calls / m, m, rows)}", rows[0].line,
                bytes_of(rows) - sum(row.expected_bytes or 0 for row in rows),
            )  # fmt: skip
    _explain_other_gathers(summary, fsdp, options.shapes)
    scatters = rows_of(summary, ["reduce-scatter"], fsdp.ranks)
    for unit in dict.fromkeys(row.module for row in scatters if row.module in units):
        rows = [row for row in scatters if row.module == unit]  # parts of a unit may go by themselves
        once = ring_half(gradients[unit], n).sent
        # set_requires_gradient_sync() adds micro-batches up on the rank
        share_expected(rows, once if bytes_of(rows) < 1.5 * once else m * once, f"gradients of {unit}")
    sent, line = bytes_of(gathers), gathers[0].line if gathers else ""
    if m > 1 and gathers:
        yield StepFinding(
            f"parameters are gathered anew for each of {m} micro-batches, {amount(sent)} a step: fewer, larger "
            "micro-batches send less; set_reshard_after_backward(False) keeps them gathered until the last",
            line, sent * (m - 1) / m,
        )  # fmt: skip
    low = low_precision(summary)
    if low and "float32" in options.gathered_in:
        yield StepFinding(
            f"parameters are gathered as float32 though the forward is computed in {low}: "
            f"MixedPrecisionPolicy(param_dtype=torch.{low}) gathers half", line, sent / 2,
        )  # fmt: skip
    for replicas in options.replicas:
        for row in rows_of(summary, ["all-reduce"], replicas):
            if row.site.phase == "backward" and row.module in units:
                row.expected_bytes = ring_all_reduce(gradients[row.module] / n, len(replicas)).sent * m
                row.why = f"shards of gradients of {row.module}, summed over the replicas"


def _gathered_again(
    options: Fsdp2Options, unit: str, backward: bool, calls: float, m: int, rows: list[CollectiveRow]
) -> str:
    """Says why a unit is gathered more often than once; empty where that is not known."""
    runs = options.runs.get(unit, 0) / m
    if any(row.site.phase == "between" for row in rows):
        return ": unshard() is called for it, and it was given back before its forward, or after it"
    if runs <= 1 or calls not in (runs, runs - 1):
        return ""
    if backward:
        return f": it runs {runs:g} times in its forward, and the backward of each run gives it back"
    advice = "set_reshard_after_forward(False) keeps it"
    return f": it runs {runs:g} times, and is given back after each (reshard_after_forward); {advice}"


def _explain_other_gathers(summary: Summary, fsdp: Parallelism, parameters: dict[str, list[int]]) -> None:
    """Explains gathers of a weight that is in no unit: torch gathers what is used while it is sharded."""
    for row in rows_of(summary, ["all-gather"], fsdp.ranks):
        shapes = [list(shape) for shape in row.shapes if len(shape) > 1]
        alike = [name for name, shape in parameters.items() if shape in shapes]
        if alike and not row.why and row.module not in fsdp.unit_bytes and row.site.phase in ("forward", "backward"):
            names = first_of(alike, 2, " or ", ", or {} more")
            row.why = (
                f"of the shape of {names}: a sharded weight that is used outside of its module is gathered by itself"
            )


def fsdp1(summary: Summary, fsdp: Parallelism) -> Iterator[StepFinding]:
    """Expects of FSDP1 3Ψ(N−1)/N for each micro-batch: gathered forward and backward, reduced once."""
    assert isinstance(fsdp.options, Fsdp1Options)
    strategy = fsdp.options.sharding_strategy
    n, m = len(fsdp.ranks), summary.micro_batches
    gathered = sum(fsdp.unit_bytes.values()) * (1 if strategy == "SHARD_GRAD_OP" else 2)
    if strategy == "FULL_SHARD":  # the root's parameters stay gathered from the forward to the backward
        gathered -= fsdp.unit_bytes.get(ROOT, 0)
    for kind, nbytes, why in (
        ("all-gather", gathered, "parameters, gathered"),
        ("reduce-scatter", sum(fsdp.options.gradient_bytes.values()), "gradients, reduced to their shards"),
    ):
        yield from expect_together(rows_of(summary, [kind], fsdp.ranks), ring_half(nbytes, n).sent * m, why)


def deepspeed(summary: Summary, zero: Parallelism) -> Iterator[StepFinding]:
    """Expects of DeepSpeed ZeRO's formulas, 2Ψ, 2Ψ, (m + 1)Ψ and 3mΨ times (N−1)/N; says what it does otherwise."""
    assert isinstance(zero.options, ZeroOptions)
    stage, n, m = zero.options.stage, len(zero.ranks), zero.options.micro_batches
    half = ring_half(sum(zero.unit_bytes.values()), n).sent
    name = f"ZeRO-{stage}" if stage else "DeepSpeed"
    summed, gathered = (
        [row for row in rows_of(summary, kinds, zero.ranks)
         if row.bytes > SMALL_BYTES and not row.site.objects and row.site.use != NORM]
        for kinds in (("all-reduce", "reduce-scatter", "reduce"), ("all-gather", "broadcast"))
    )  # fmt: skip
    why = "its default sums all gradients whole (use_multi_rank_bucket_allreduce)" if stage in (1, 2) else ""
    yield from expect_together(summed, half * (2, 1, m, m)[stage], "gradients", f"{name}'s gradients", why)
    if stage:
        parameters, reason = half * (2 * m if stage == 3 else 1), ""
        if stage == 3 and bytes_of(gathered) < parameters:
            reason = (
                "parameters below stage3_param_persistence_threshold, and as many as stage3_max_live_parameters "
                "allows, stay gathered"
            )
        yield from expect_together(gathered, parameters, "parameters, gathered", f"{name}'s parameters", reason)


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


def expect_traffic(summary: Summary) -> list[StepFinding]:
    """Gives rows the bytes that the traffic of all parallelisms predicts for them.

    A prediction is met, or missed, with all rows that its shape fits: what one row is short of another may have.
    """
    predicted = [traffic for parallelism in summary.parallelism for traffic in parallelism.options.traffic]
    rows = [
        row for row in summary.collectives if row.site.phase != "evaluation" and not row.site.objects and not row.why
    ]
    findings = []
    fits = [(traffic, [row for row in rows if _fits(traffic, row)]) for traffic in predicted]
    for of_these, fitted in _together(fits):
        findings += _compare_rows(summary, of_these, fitted)
    for parallelism in summary.parallelism:
        _name_carried(summary, parallelism.kind, parallelism.ranks, parallelism.options.by)
    return findings


def _fits(traffic: ExpectedTraffic, row: CollectiveRow) -> bool:
    """Whether a row may be this traffic: the same kind of call, in its group and phase, of a tensor of its size."""
    if row.kind != traffic.kind or row.ranks != tuple(traffic.ranks):
        return False
    phases = {"forward": ("forward", "between"), "backward": ("backward",)}  # a model's own hooks run after it
    if traffic.phase and row.site.phase not in phases[traffic.phase]:
        return False
    if row.site.repeated and not traffic.repeated and traffic.phase:
        return False
    elements, n = traffic.elements, len(row.ranks)
    return not elements or any(prod(shape) in (elements, elements // n) for shape in row.shapes)


def _together(
    fits: list[tuple[ExpectedTraffic, list[CollectiveRow]]],
) -> list[tuple[list[ExpectedTraffic], list[CollectiveRow]]]:
    """Joins traffic that shares rows, with those rows; traffic without any is left out."""
    sets: list[tuple[list[ExpectedTraffic], list[CollectiveRow]]] = []
    for traffic, rows in fits:
        if not rows:
            continue
        ids = set(map(id, rows))
        joined = [group for group in sets if ids & set(map(id, group[1]))]
        sets = [group for group in sets if all(group is not other for other in joined)]
        together = [earlier for group in joined for earlier in group[0]] + [traffic]
        unique = {id(row): row for group in joined for row in group[1]} | {id(row): row for row in rows}
        sets.append((together, list(unique.values())))
    return sets


def _compare_rows(summary: Summary, predicted: list[ExpectedTraffic], rows: list[CollectiveRow]) -> list[StepFinding]:
    """Fills in the expected bytes, and the reason for a difference, of rows that belong together."""
    expected, sent = sum(traffic.bytes for traffic in predicted), bytes_of(rows)
    vocabularies, findings = summary.model.get("vocabularies", []), []
    if any(traffic.what.startswith("outputs of") and traffic.width in vocabularies for traffic in predicted):
        findings.append(gathered_logits(rows[0], sent))
    share_expected(rows, expected)
    for row in rows:
        fits = [traffic for traffic in predicted if _fits(traffic, row)]
        fits = [traffic for traffic in fits if traffic.repeated == row.site.repeated] or fits
        texts = [f"{traffic.what}{RECOMPUTED if traffic.repeated else ''}" for traffic in fits]
        row.why = "; ".join(dict.fromkeys(texts))
    if abs(sent - expected) > MET * expected:
        findings += _shared_inputs(predicted, rows, expected, sent)
        if not findings:
            reason = _difference(summary, predicted, rows, expected, sent)
            for row in rows:
                row.why += f": {reason}"
    for row in rows:
        row.why += "; small: it costs its latency" if 0 < row.bytes <= SMALL_BYTES else ""
    return findings


def _shared_inputs(
    predicted: list[ExpectedTraffic], rows: list[CollectiveRow], expected: float, sent: float
) -> list[StepFinding]:
    """Several layers that take one input, and each gather it, or sum its gradient; nothing where that is not why."""
    again = sum(traffic.again_bytes for traffic in predicted)
    if not again or abs(sent - expected - again) > MET * (expected + again):
        return []
    same = {name: first for traffic in predicted for name, first in traffic.same.items()}
    once = [row for row in rows if row.module not in same]
    if abs(bytes_of(once) - expected) <= MET * expected:
        for row in rows:
            row.expected_bytes = 0.0 if row.module in same else row.bytes
    for row in rows:
        if row.module in same:
            row.why += f": {same[row.module]} takes the same, and each does it for itself"
    layers = list(dict.fromkeys(name for pair in same.items() for name in reversed(pair)))
    verb = "gathers it" if rows[0].kind == "all-gather" else "sums its gradient"
    return [StepFinding(
        f"{first_of(layers, 3)} share inputs, and each {verb} for itself, {amount(sent)} a step where once for an "
        f"input would be {amount(expected)}: PrepareModuleInput on the module around them does it once", rows[0].line,
        sent - expected,
    )]  # fmt: skip


def _difference(
    summary: Summary, predicted: list[ExpectedTraffic], rows: list[CollectiveRow], expected: float, sent: float
) -> str:
    """Says why more, or less, was sent than the formula predicts."""
    times, m = sent / expected if expected else 0.0, summary.micro_batches
    if all(traffic.what == REPLICATED for traffic in predicted) and times > 1.5 and abs(times - round(times)) < MET:
        if all(row.site.phase == "step" for row in rows):
            return (
                f"{times:.0f} times, since they are sums of several ranks still when the optimizer steps, and each of "
                "its operations that needs them sums them anew"
            )
        if round(times) == m > 1:
            return f"after each of {m} micro-batches"
    if all(traffic.what == PARAMETERS for traffic in predicted) and abs(times - (predicted[0].optimizers or 0)) < MET:
        return f"{times:.0f} times, since each of the {times:.0f} chained optimizers has all of them gathered"
    return f"the formula says {amount(expected)} for all {amount(sent)}; why it differs is not known"


def gathered_logits(row: CollectiveRow, nbytes: float) -> StepFinding:
    """Finds logits that are gathered whole."""
    return StepFinding(
        f"logits are gathered whole, {_times_text(row)} a step: a figure of them can be counted on each rank, a loss "
        "be computed where the vocabulary is cut, and a few numbers sent", row.line, nbytes,
    )  # fmt: skip


def _times_text(row: CollectiveRow) -> str:
    return "once" if row.calls == 1 else f"{row.calls:.2g} times"


def _name_carried(summary: Summary, kind: str, ranks: Iterable[int], by: str) -> None:
    """Names what calls of more than a few bytes carry that no formula covers."""
    if kind not in CARRIED:
        return
    phases, carried = CARRIED[kind]
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
    for row in summary.collectives:
        within = row.kind == "send" and kind in ("PP", "CP") and set(row.ranks) <= set(ranks)
        if not within and (row.kind not in kinds or row.ranks != tuple(ranks)):
            continue
        if kind == "CP" and by == "torch" and row.site.use != CONTEXT:
            continue
        if row.site.phase in phases and row.bytes > SMALL_BYTES and not row.why:
            row.why = carried


#: What gives the rows of a parallelism what was expected of them, and finds what differs, and what would send less. Of
#: models that are cut over ranks :func:`expect_traffic` does the same, for all groups together.
RULES = {"DDP": ddp, "FSDP2": fsdp2, "HSDP": fsdp2, "FSDP1": fsdp1, "DeepSpeed": deepspeed}


def explain(summary: Summary) -> None:
    """Adds expected bytes to the rows, and findings to the summary."""
    findings = summary.findings
    for parallelism in summary.parallelism:
        if rule := RULES.get(parallelism.kind.partition(" ")[0]):
            findings += rule(summary, parallelism)
    findings += expect_traffic(summary)
    _by_hand(summary)
    for row in summary.collectives:
        if row.site.phase == "evaluation":
            row.why = "of a model that runs without gradients: an evaluation, a teacher"
        elif not row.why:
            row.why, hint = _other(summary, row)
            findings += (
                [hint] if isinstance(hint, StepFinding) else [StepFinding(hint, row.line, row.bytes)] if hint else []
            )
    findings += [*one_unit(summary.parallelism), *_late(summary)]
    summary.findings = list(dict.fromkeys(findings))  # what two groups of one parallelism both have
    if summary.ranks > 1 and _alone(summary):
        alone = f"nothing is summed: each of the {summary.ranks} ranks trains a model of its own"
        rarely = f"unless it is averaged in other steps than the {summary.steps} measured"
        summary.findings.insert(0, StepFinding(f"{alone}, {rarely}"))


def _alone(summary: Summary) -> bool:
    """Whether the ranks certainly have nothing to do with one another: nothing recognised, called, or counted.

    A model of a few numbers is not judged: its gradients look like metrics.
    """
    if summary.parallelism or summary.model.get("parameters", 0) < 100 * METRIC:
        return False
    if summary.wire_bytes is None or max(summary.wire_bytes) > SMALL_BYTES:  # a library may have sockets of its own
        return False
    return not any(prod(shape) > METRIC for row in summary.collectives if not row.site.objects for shape in row.shapes)


def _by_hand(summary: Summary) -> None:
    """Recognises by its bytes what a script sends by itself: sums of gradients, a sharded optimizer, averages.

    All-reduces of a group that have, together, as many bytes as all gradients are the script's own sum of them.
    Reduce-scatters of as many bytes as the gradients have, and gathers of as many as the parameters, are those of
    ZeRO-1 and 2, and of optimizers that shard themselves; small tensors may be summed whole. All-reduces that not every
    step has, of as many bytes in those that have them as all parameters, are local SGD.
    """
    nbytes = _parameter_bytes(summary)
    for ranks in {row.ranks for row in summary.collectives} if nbytes else ():
        rows = [row for row in summary.collectives if row.ranks == ranks and not row.why and not row.site.objects]
        once, half = ring_all_reduce(nbytes, len(ranks)).sent, ring_half(nbytes, len(ranks)).sent
        scattered, gathered, summed = (
            [row for row in rows if row.kind == kind] for kind in ("reduce-scatter", "all-gather", "all-reduce")
        )
        sums = [
            row for row in summed
            if row.site.phase in ("between", "backward") and any(prod(shape) > METRIC for shape in row.shapes)
        ]  # fmt: skip
        sent = bytes_of(sums)
        if sent and abs(sent - once) <= 0.01 * once and not summary.model.get("frozen", 0):
            share_expected(sums, once, _SUMMED)  # a group of one rank sends nothing
        scattered, gathered, summed = (
            [row for row in of_kind if row.site.phase in ("between", "step") and not row.why]
            for of_kind in (scattered, gathered, summed)
        )
        rest = half - bytes_of(summed) / 2
        if half and all(0.95 * rest < bytes_of(of_kind) < 1.05 * half for of_kind in (scattered, gathered)):
            share_expected(scattered, rest, _SCATTERED)
            share_expected(gathered, rest, _GATHERED)
            for row in summed:
                row.why = "small gradients, summed whole"
        for row in rows:
            tensors = len(row.shapes)  # each has a call of its own, or all have one
            if row.kind == "all-reduce" and not row.why and 0 < row.calls < tensors and once:
                of_a_call = row.bytes / row.calls
                if any(math.isclose(sent, once, rel_tol=0.02) for sent in (of_a_call, of_a_call * tensors)):
                    row.why = "as many bytes as all parameters have, not in every step: averaged now and then "
                    row.why += "(local SGD)"


def _parameter_bytes(summary: Summary) -> int:
    """Returns the bytes of all parameters in their own types."""
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    return sum(sizes.get(dtype, 0) * count for dtype, count in summary.model.get("dtypes", {}).items())


def _other(summary: Summary, row: CollectiveRow) -> tuple[str, str | StepFinding]:
    """Says what a row is that no parallelism has, and what to change: objects, barriers, metrics, small messages."""
    times, between = _times_text(row), row.site.phase == "between"
    if len(row.ranks) == 1:
        return "a group of one rank sends nothing", ""
    if row.site.objects:
        hint = f"Python objects travel {times} a step ({row.site.objects}): send a tensor, or every so many steps"
        return f"Python objects, pickled ({row.site.objects})", hint
    if row.kind == "barrier":
        return "a barrier", StepFinding(f"all ranks wait for one another at a barrier, {times} a step", row.line)
    vocabularies = summary.model.get("vocabularies", [])
    if row.kind == "all-gather" and any(len(shape) > 1 and shape[-1] in vocabularies for shape in row.shapes):
        return "logits, gathered whole", gathered_logits(row, row.bytes)
    if row.site.use == NORM and row.bytes <= SMALL_BYTES:
        return "the norm of all gradients, or whether one overflowed", ""
    if row.kind == "broadcast" and row.module.endswith("DistributedDataParallel") and row.bytes > SMALL_BYTES:
        return "DDP gives all ranks rank 0's buffers", (
            "DDP sends rank 0's buffers before each forward pass: where they are masks and tables, which never change, "
            "broadcast_buffers=False saves that"
        )
    if row.kind in ("all-reduce", "all-gather") and between and all(prod(shape) <= METRIC for shape in row.shapes):
        return "a figure or two, outside of forward and backward: a metric", (
            f"a small {row.kind} outside of forward and backward, {times} a step: each waits for the last rank; "
            f"{'sum' if row.kind == 'all-reduce' else 'gather'} such figures together, or every so many steps"
        )
    if row.kind == "broadcast" and _REDUNDANCY in summary.model.get("trained", {}).get("optimizers", []):
        return f"parameters, from the rank that has updated them ({_REDUNDANCY})", ""
    return "small: it costs its latency" if row.bytes <= SMALL_BYTES else "", ""


def one_unit(parallelism: Iterable[Parallelism]) -> Iterator[StepFinding]:
    """Finds FSDP2 on the whole model alone though it has layers: no gather then overlaps with computation."""
    for unit in parallelism:
        shapes = unit.options.shapes if isinstance(unit.options, Fsdp2Options) else {}
        layers = {name.rpartition(".")[0] for name in shapes if "." in name}
        if unit.wraps == (ROOT,) and len(layers) > 2:
            yield StepFinding(
                "the whole model is one unit of FSDP2: all parameters are gathered before the first layer, and stay to "
                "the last; call fully_shard on each layer, then on the model", "", sum(unit.unit_bytes.values()),
            )  # fmt: skip


def _late(summary: Summary) -> Iterator[StepFinding]:
    """Finds a rank that computes longer than the others, which wait for it; of two slow ones neither is late."""
    if summary.ranks < 2:
        return
    *others, longest = sorted(summary.time, key=lambda times: times.compute_s)
    waited = statistics.median(times.idle_s for times in others)
    late = max(LATE * longest.step_s, LATE_S)
    if longest.compute_s - others[-1].compute_s > late and waited > late:
        yield StepFinding(
            f"rank {longest.rank} computes {1e3 * longest.compute_s:.0f} ms of a step, the others "
            f"{1e3 * others[-1].compute_s:.0f}: they wait {1e3 * waited:.0f} ms for it",
        )  # fmt: skip
