"""Predicts a step's time on named GPUs and links by simulating its recorded operations and collectives."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from pardemo.cluster import Cluster
from pardemo.planner.hardware import ENDLESS, FP32_TFLOPS, Gpu, gpu
from pardemo.planner.layouts.machines import ATTENTION, Machine
from pardemo.planner.layouts.programs import Program
from pardemo.script.runtime.collectives import Call
from pardemo.script.step import WARM_UP_STEPS
from pardemo.script.step.layer_padding import BACKWARD_PER_FORWARD
from pardemo.script.step.operations import Operation, StepWork
from pardemo.script.step.pace import PaceSettings
from pardemo.script.step.rank_trace import RankTrace
from pardemo.script.step.simulation import ComputeTime, simulate_step
from pardemo.script.step.summary import PacedStep, Summary

#: Of a processor, for one operation from Python: 24 layers of width 1,024, some 3,200 operations, take 79 ms on an A100
#: whether a micro-batch has one sample or nearly two (vTrain's measurements).
LAUNCH_S = 24e-6
#: What a product loses of its rows, depth and columns to tiles that are not full: the planner's, of any program.
TILE_LOSS = Program("any").tile_loss
#: TF32's rate of the datasheets, as a share of that of 16 bits.
TF32 = 0.5


def add_paced_step(pace: PaceSettings, summary: Summary, traces: Sequence[RankTrace]) -> None:
    """Adds what ``--pace`` asks for to the summary: the predicted times of a step.

    Raises:
        ValueError: layers compute longer here than they are to take; what :func:`on_gpus` raises.
    """
    if pace.gpu:
        host_ranks = pace.cluster.ranks_per_host if pace.cluster else summary.ranks
        machine = devices(pace.gpu, summary.ranks, host_ranks, pace.between, pace.inside)
        summary.paced = on_gpus(traces, machine)
        return
    own_s = {
        name: statistics.median(of_passes[len(of_passes) // 2 :])  # not the first steps, whose operators are followed
        for trace in traces
        if trace.padded
        for name, of_passes in trace.padded.computed_s.items()
    }
    if own_s and max(own_s.values()) > pace.layer_s:
        name = max(own_s, key=own_s.__getitem__)
        raise ValueError(
            f"a layer cannot take {1e3 * pace.layer_s:g} ms here: {name} computes {1e3 * own_s[name]:.1f} ms "
            "by itself; give --pace more, or make the layers smaller"
        )
    summary.paced = on_layers(traces, pace.cluster or Cluster(1, summary.ranks))


def devices(name: str, ranks: int, host_ranks: int, between: float | None, inside: float | None) -> Machine:
    """Makes a machine of named GPUs, one a rank. between, inside: bytes/s of a host's network card, of a GPU's link.

    Raises:
        ValueError: there is no such GPU.
    """
    device = gpu(name)
    if inside is not None:
        device = replace(device, link_bytes_per_s=inside)
    machine = Machine(device, ranks, host_ranks)
    return machine if between is None else replace(machine, between=between)


def on_gpus(traces: Sequence[RankTrace], machine: Machine) -> PacedStep:
    """Predicts the second step of all ranks on GPUs.

    Raises:
        ValueError: nothing was recorded; the GPU's rate for the script's products is not known; ranks wait for one
            another for ever, where messages wait for their receiver, as nccl's do.
    """
    works = _works(traces)
    kinds = {event.product for work in works.values() for event in work.list if isinstance(event, Operation)}
    of_kind, assumed = gpu_rates(kinds, any(work.tf32 for work in works.values()), machine)
    on_gpu = operation_s(machine, of_kind)
    assumed.append(
        f"{1e6 * LAUNCH_S:.0f} µs of a processor for each operation, as eager PyTorch takes on published runs; what "
        "else the script's Python does, data and files take no time"
    )
    if any("compile" in note for trace in traces for note in trace.notes):
        assumed.append("operations one by one: torch.compile would launch fewer")

    def communicate_s(call: Call) -> float:
        return collective_s(call, machine)

    return _predict(traces, machine, lambda _, operation: on_gpu(operation), LAUNCH_S, communicate_s, assumed)


def _works(traces: Sequence[RankTrace]) -> dict[int, StepWork]:
    """Returns the operations of each rank's second step."""
    works = {trace.rank: trace.work for trace in traces if trace.work is not None}
    if len(works) < len(traces):
        raise ValueError("the script ended within its second step, which --pace follows")
    return works


def _predict(
    traces: Sequence[RankTrace], machine: Machine, compute_s: ComputeTime, launch_s: float,
    communicate_s: Callable[[Call], float], assumed: list[str],
) -> PacedStep:  # fmt: skip
    """Predicts the second step of all ranks, and the same step with collectives that take no time.

    A collective that no later step has takes none.
    """
    later = set().union(*(_later(trace) for trace in traces))
    calls = {trace.rank: trace.calls for trace in traces}
    programs = {rank: (work.list, calls[rank]) for rank, work in _works(traces).items()}
    with_links = simulate_step(
        programs, compute_s, launch_s, lambda call: communicate_s(call) if _call_key(call) in later else None
    )
    alone = simulate_step(programs, compute_s, launch_s, lambda call: None)
    return PacedStep(machine.gpu.name, _links(machine), with_links, max(run.step_s for run in alone), assumed)


def on_layers(traces: Sequence[RankTrace], cluster: Cluster) -> PacedStep:
    """Predicts the second step of all ranks with these links, layers of the given time, and no time for all else.

    It is what the run with padded layers is held against: the same arithmetic as :func:`on_gpus`, beside a measurement.

    Raises:
        ValueError: the script has no layers, or ended within its second step.
    """
    if not all(work.layers for work in _works(traces).values()):
        raise ValueError("the script's model has no list of equal layers that could take a given time each")
    between = cluster.between_rate or ENDLESS
    device = Gpu("layers that wait", 0.0, ENDLESS, ENDLESS, cluster.inside_rate or ENDLESS, "this machine")
    machine = Machine(device, cluster.size, cluster.ranks_per_host, between, 0.0, 0.0, link_share=1.0)
    shares = {trace.rank: _shares(trace) for trace in traces}

    def communicate_s(call: Call) -> float:
        return collective_s(call, machine) * (call.gloo_bytes / call.sent if call.sent else 1.0)  # by gloo's algorithm

    def compute_s(rank: int, operation: Operation) -> float:
        return shares[rank].get(id(operation), 0.0)

    predicted = _predict(traces, machine, compute_s, 0.0, communicate_s, [])
    return replace(predicted, layer_s=traces[0].padded.forward_s if traces[0].padded else 0.0)


def _shares(trace: RankTrace) -> dict[int, float]:
    """Divides the time of a layer's pass over its operations in proportion to what a GPU would take for them."""
    assert trace.work is not None
    assert trace.padded is not None
    machine = Machine(gpu("A100-80GB"))
    passes: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for event in trace.work.list:
        if isinstance(event, Operation):
            layer = next((name for name in trace.work.layers if f"{event.module}.".startswith(f"{name}.")), "")
            if layer and event.phase in ("forward", "backward", "recomputed"):
                weight = event.bytes / machine.memory_bytes_per_s + event.flops / machine.matrix_flops
                passes[layer, event.phase].append((id(event), weight))
    shares: dict[int, float] = {}
    for (_, phase), events in passes.items():
        total = sum(weight for _, weight in events) or 1.0
        per_forward = BACKWARD_PER_FORWARD if phase == "backward" else 1
        seconds = trace.padded.forward_s * per_forward * trace.cuts[1].backwards
        shares |= {event: seconds * weight / total for event, weight in events}
    return shares


def collective_s(call: Call, machine: Machine) -> float:
    """Predicts a collective's seconds by the algorithm that sends least; ranks are numbered host by host."""
    ranks = sorted(call.ranks)
    n, host = len(ranks), machine.host_gpus
    if n < 2:
        return 0.0
    stride = max(1, min(b - a for a, b in itertools.pairwise(ranks)))
    within = len({rank // host for rank in ranks}) == 1
    if call.kind in ("send", "receive"):
        return machine.send(call.nbytes, ranks[1] - ranks[0], leaves=not within)
    if within:  # the machine's own question is whether every stride-th of so many fits on a host
        stride = min(stride, max(1, host // n))
    times: dict[str, Callable[[float, int, int], float]] = {
        "all-reduce": machine.all_reduce, "all-gather": machine.gather, "reduce-scatter": machine.gather,
        "all-to-all": machine.all_to_all,
    }  # fmt: skip
    if call.kind in times:
        return times[call.kind](call.nbytes, n, stride)
    # one to all, or all to one, in a pipeline
    return machine.latency(n, stride) + call.nbytes / machine.rate(n, stride)


def operation_s(machine: Machine, of_kind: Mapping[str, float]) -> Callable[[Operation], float]:
    """Returns a function of an operation's seconds: a product's by its sizes and rate, others by their bytes."""

    def seconds(operation: Operation) -> float:
        moving = operation.bytes / machine.memory_bytes_per_s
        if not operation.product:
            return moving
        lost = math.prod(1 + TILE_LOSS / size for size in operation.sizes)
        return max(moving, operation.flops * lost / of_kind[operation.product])

    return seconds


def gpu_rates(kinds: Collection[str], tf32: bool, machine: Machine) -> tuple[dict[str, float], list[str]]:
    """Returns operations a second by kind of product, and the assumptions that a reader should know.

    Raises:
        ValueError: products of fp32, whose rate on this GPU nobody has published.
    """
    of_kind = {"16": machine.matrix_flops, "attention16": machine.attention_flops}
    assumed = []
    if {"32", "attention32"} & set(kinds):
        if tf32:
            of_kind["32"] = TF32 * machine.matrix_flops
            assumed.append("products of fp32 as TF32, which the script allows")
        elif machine.gpu.name in FP32_TFLOPS:
            share = machine.matrix_flops / machine.gpu.flops
            of_kind["32"] = share * FP32_TFLOPS[machine.gpu.name] * 1e12
            assumed.append(
                f"products of fp32 without TF32, {FP32_TFLOPS[machine.gpu.name]:g} TFLOP/s by the datasheet, as torch "
                "has it unless it is told otherwise"
            )
        else:
            raise ValueError(f"the script multiplies in fp32, and nobody has published that rate of {machine.gpu.name}")
        of_kind["attention32"] = ATTENTION * of_kind["32"]
    return of_kind, assumed


def _later(trace: RankTrace) -> set[tuple]:
    measured = [call for call in trace.calls if call.step >= WARM_UP_STEPS]
    return {_call_key(call) for call in measured or trace.calls}


def _call_key(call: Call) -> tuple:
    return call.kind, call.group, call.ranks, call.site.line, call.site.use


def _links(machine: Machine) -> str:
    inside = f"{machine.gpu.link_bytes_per_s / 1e9:,.4g} GB/s a GPU inside a node"
    if machine.hosts == 1:
        return inside
    return f"{machine.hosts} nodes of {machine.host_gpus}: {inside}, {machine.between / 1e9:,.4g} GB/s a node between"
