"""What a reader would change in a script, from its median step."""

import math
import statistics
from math import prod

from pardemo.formulas.communication import ring_all_reduce, ring_half
from pardemo.script.runtime.call_sites import NORM, ROOT
from pardemo.script.step import formulas
from pardemo.script.step.formulas import SMALL, gathered_logits
from pardemo.script.step.summary import Finding, Row, Summary

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


def explain(measured: Summary) -> None:
    """Gives rows what was expected of them, and the summary its findings."""
    for parallelism in measured.parallelism:
        measured.findings += formulas.explain_parallelism(measured, parallelism)
    measured.findings += formulas.by_terms(measured)
    _summed_by_hand(measured)
    _sharded_by_hand(measured)
    _averaged_now_and_then(measured)
    for row in measured.collectives:
        _other(measured, row)
    _one_unit(measured)
    _late(measured)
    measured.findings = list(dict.fromkeys(measured.findings))  # what two groups of one parallelism both have
    if measured.ranks > 1 and _alone(measured):
        alone = f"nothing is summed: each of the {measured.ranks} ranks trains a model of its own"
        measured.findings.insert(0, Finding(alone))


def _alone(measured: Summary) -> bool:
    """Whether the ranks certainly have nothing to do with one another: nothing recognised, called, or counted.

    A model of a few numbers is not judged: its gradients look like metrics.
    """
    if measured.parallelism or measured.model.get("parameters", 0) < 100 * METRIC:
        return False
    if measured.wire_bytes is None or max(measured.wire_bytes) > SMALL:  # a library may have sockets of its own
        return False
    return not any(
        prod(shape) > METRIC for row in measured.collectives if not row.place.objects for shape in row.shapes
    )


def _summed_by_hand(measured: Summary) -> None:
    """All-reduces of a group that have, together, as many bytes as all gradients: a script's own sum of them."""
    frozen = measured.model.get("frozen", 0)
    nbytes = _parameter_bytes(measured)
    for ranks in {row.ranks for row in measured.collectives} if nbytes and not frozen else ():
        rows = [row for row in measured.collectives if row.ranks == ranks and row.kind == "all-reduce" and not row.why]
        rows = [row for row in rows if row.place.phase in ("between", "backward") and not row.place.objects]
        rows = [row for row in rows if any(prod(shape) > METRIC for shape in row.shapes)]
        once = ring_all_reduce(nbytes, len(ranks)).sent
        sent = sum(row.bytes for row in rows)
        if rows and sent and abs(sent - once) <= 0.01 * once:  # a group of one rank sends nothing
            for row in rows:
                row.expected_bytes, row.why = once * row.bytes / sent, _SUMMED


def _sharded_by_hand(measured: Summary) -> None:
    """Reduce-scatters of as many bytes as the gradients have, and gathers of as many as the parameters, by the script.

    As ZeRO-1 and 2, and optimizers that shard themselves. Small tensors may be summed whole.
    """
    nbytes = _parameter_bytes(measured)
    for ranks in {row.ranks for row in measured.collectives} if nbytes else ():
        rows = [row for row in measured.collectives if row.ranks == ranks and not row.why and not row.place.objects]
        rows = [row for row in rows if row.place.phase in ("between", "step")]
        scattered, gathered, summed = (
            [row for row in rows if row.kind == kind] for kind in ("reduce-scatter", "all-gather", "all-reduce")
        )
        half = ring_half(nbytes, len(ranks)).sent
        sent = sum(row.bytes for row in scattered), sum(row.bytes for row in gathered)
        rest = half - sum(row.bytes for row in summed) / 2
        if not half or not all(0.95 * rest < some < 1.05 * half for some in sent):
            continue
        for some, of_some, why in ((scattered, sent[0], _SCATTERED), (gathered, sent[1], _GATHERED)):
            for row in some:
                row.expected_bytes, row.why = rest * row.bytes / of_some, why
        for row in summed:
            row.why = "small gradients, summed whole"


def _averaged_now_and_then(measured: Summary) -> None:
    """All-reduces that not every step has, of as many bytes in those that have them as all parameters: local SGD."""
    nbytes = _parameter_bytes(measured)
    for row in measured.collectives if nbytes else ():
        tensors = len(row.shapes)  # each has a call of its own, or all have one
        if row.kind != "all-reduce" or row.why or not 0 < row.calls < tensors:
            continue
        once, of_a_call = ring_all_reduce(nbytes, len(row.ranks)).sent, row.bytes / row.calls
        if once and any(math.isclose(sent, once, rel_tol=0.02) for sent in (of_a_call, of_a_call * tensors)):
            row.why = "as many bytes as all parameters have, not in every step: averaged now and then (local SGD)"


def _parameter_bytes(measured: Summary) -> int:
    """Bytes of all parameters in their own types."""
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    return sum(sizes.get(dtype, 0) * count for dtype, count in measured.model.get("dtypes", {}).items())


def _other(measured: Summary, row: Row) -> None:
    """What is no parallelism's: objects, barriers, metrics, logits, small messages."""
    if row.place.phase == "evaluation":
        row.why = "of a model that runs without gradients: an evaluation, a teacher"
    if row.why:
        return
    times = "once" if row.calls == 1 else f"{row.calls:.2g} times"
    vocabulary = measured.model.get("vocabularies", [])
    if row.place.objects:
        row.why = f"Python objects, pickled ({row.place.objects})"
        what = f"Python objects travel {times} a step ({row.place.objects}): send a tensor, or every so many steps"
        measured.findings.append(Finding(what, row.line, row.bytes))
    elif row.kind == "barrier":
        row.why = "a barrier"
        measured.findings.append(Finding(f"all ranks wait for one another at a barrier, {times} a step", row.line))
    elif row.kind == "all-gather" and any(len(shape) > 1 and shape[-1] in vocabulary for shape in row.shapes):
        row.why = "logits, gathered whole"
        measured.findings.append(gathered_logits(row, row.bytes))
    elif row.place.use == NORM and row.bytes <= SMALL:
        row.why = "the norm of all gradients, or whether one overflowed"
    elif row.kind == "broadcast" and row.module.endswith("DistributedDataParallel") and row.bytes > SMALL:
        row.why = "DDP gives all ranks rank 0's buffers"
        what = (
            "DDP sends rank 0's buffers before each forward pass: where they are masks and tables, which never change, "
            "broadcast_buffers=False saves that"
        )
        measured.findings.append(Finding(what, row.line, row.bytes))
    elif (
        row.kind in ("all-reduce", "all-gather") and row.place.phase == "between"
        and all(prod(shape) <= METRIC for shape in row.shapes)
    ):  # fmt: skip
        row.why = "a figure or two, outside of forward and backward: a metric"
        what = (
            f"a small {row.kind} outside of forward and backward, {times} a step: each waits for the last rank; "
            f"{'sum' if row.kind == 'all-reduce' else 'gather'} such figures together, or every so many steps"
        )
        measured.findings.append(Finding(what, row.line, row.bytes))
    elif row.kind == "broadcast" and _REDUNDANCY in measured.model.get("trained", {}).get("optimizers", []):
        row.why = f"parameters, from the rank that has updated them ({_REDUNDANCY})"
    elif row.bytes <= SMALL:
        row.why = "small: it costs its latency"


def _one_unit(measured: Summary) -> None:
    """FSDP2 on the whole model alone, which has layers: nothing is gathered while something else computes."""
    for parallelism in measured.parallelism:
        layers = {name.rpartition(".")[0] for name in parallelism.options.get("shapes", {}) if "." in name}
        if parallelism.kind in ("FSDP2", "HSDP") and parallelism.wraps == (ROOT,) and len(layers) > 2:
            measured.findings.append(Finding(
                "the whole model is one unit of FSDP2: all parameters are gathered before the first layer, and stay to "
                "the last; call fully_shard on each layer, then on the model",
                bytes=sum(parallelism.unit_bytes.values()),
            ))  # fmt: skip


def _late(measured: Summary) -> None:
    """A rank that computes longer than the others, who wait for it."""
    if measured.ranks < 2:
        return
    longest = max(measured.time, key=lambda one: one.compute_s)
    others = max(
        rank_times.compute_s for rank_times in measured.time if rank_times is not longest
    )  # of two slow ones neither is late
    waited = statistics.median(rank_times.idle_s for rank_times in measured.time if rank_times is not longest)
    step = longest.step_s
    late = max(LATE * step, LATE_S)
    if longest.compute_s - others > late and waited > late:
        measured.findings.append(Finding(
            f"rank {longest.rank} computes {1e3 * longest.compute_s:.0f} ms of a step, the others {1e3 * others:.0f}: "
            f"they wait {1e3 * waited:.0f} ms for it",
        ))  # fmt: skip
