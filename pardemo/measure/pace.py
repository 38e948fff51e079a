"""What the script would take on a named GPU and its links: its operations at the planner's rates, reckoned, not run."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from pardemo.cluster import Cluster
from pardemo.measure.calls import Call
from pardemo.measure.pace_option import Pace
from pardemo.measure.program import WARM, Seen
from pardemo.measure.replay import replay
from pardemo.measure.summary import Paced, Summary
from pardemo.measure.waiting import BACKWARD
from pardemo.measure.work import Operation
from pardemo.planner.hardware import FP32_TFLOPS, Gpu, gpu
from pardemo.planner.layouts.job.machines import ATTENTION, Machine
from pardemo.planner.layouts.job.stacks import Stack

#: Of a processor, for one operation from Python: 24 layers of width 1,024, some 3,200 operations, take 79 ms on an A100
#: whether a micro-batch has one sample or nearly two (vTrain's measurements).
LAUNCH_S = 24e-6
#: What a product loses of its rows, depth and columns to tiles that are not full: the planner's, of any program.
SMALL = Stack("any").small
#: TF32's rate of the datasheets, as a share of that of 16 bits.
TF32 = 0.5
ENDLESS = 1e30  # operations or bytes a second: takes no time


def tell(asked: Pace, measured: Summary, seen: Sequence[Seen]) -> None:
    """Gives the summary what it asks for.

    Raises:
        ValueError: layers compute longer here than they are to take; what :func:`on_gpus` raises.
    """
    if asked.gpu:
        host_ranks = asked.cluster.ranks_per_host if asked.cluster else measured.ranks
        machine = devices(asked.gpu, measured.ranks, host_ranks, asked.between, asked.inside)
        measured.paced = on_gpus(seen, machine)
        return
    own = {
        name: statistics.median(some[len(some) // 2 :])  # not the first steps, whose operators are followed
        for one in seen
        if one.waited
        for name, some in one.waited.computed_s.items()
    }
    if own and max(own.values()) > asked.layer_s:
        name = max(own, key=own.__getitem__)
        raise ValueError(
            f"a layer cannot take {1e3 * asked.layer_s:g} ms here: {name} computes {1e3 * own[name]:.1f} ms by itself; "
            "give --pace more, or make the layers smaller"
        )
    measured.paced = on_layers(seen, asked.cluster or Cluster(1, measured.ranks))


def devices(name: str, ranks: int, host_ranks: int, between: float | None, inside: float | None) -> Machine:
    """GPUs of that name, one a rank. between, inside: bytes/s of a host's network card, and of a GPU's own link.

    Raises:
        ValueError: there is no such GPU.
    """
    one = gpu(name)
    if inside is not None:
        one = replace(one, link_bytes_per_s=inside)
    return Machine(one, ranks, host_ranks, **({} if between is None else {"between": between}))


def on_gpus(seen: Sequence[Seen], machine: Machine) -> Paced:
    """The second step of all ranks, on GPUs.

    Raises:
        ValueError: nothing was recorded; the GPU's rate for the script's products is not known; ranks wait for one
            another for ever, where messages wait for their receiver, as nccl's do.
    """
    if any(one.work is None for one in seen):
        raise ValueError("the script ended within its second step, which --pace follows")
    kinds = {one.product for some in seen if some.work for one in some.work.list if isinstance(one, Operation)}
    of_kind, told = rates(kinds, any(some.work.tf32 for some in seen if some.work), machine)
    on_gpu = compute(machine, of_kind)

    def compute_s(_: int, one: Operation) -> float:
        return on_gpu(one)

    programs = {one.rank: (one.work.list, one.calls) for one in seen if one.work is not None}
    later = [_later(one) for one in seen]

    def exchange_s(call: Call) -> float | None:
        return seconds(call, machine) if any(_what(call) in some for some in later) else None

    paced = replay(programs, compute_s, LAUNCH_S, exchange_s)
    alone = replay(programs, compute_s, LAUNCH_S, lambda call: None)
    told.append(
        f"{1e6 * LAUNCH_S:.0f} µs of a processor for each operation, as eager PyTorch takes on published runs; what "
        "else the script's Python does, data and files take no time"
    )
    if any(one.notes for one in seen if any("compile" in note for note in one.notes)):
        told.append("operations one by one: torch.compile would launch fewer")
    return Paced(machine.gpu.name, _links(machine), paced, max(one.step_s for one in alone), told)


def on_layers(seen: Sequence[Seen], cluster: Cluster) -> Paced:
    """The second step of all ranks, with layers that take what they were told to, all else no time, and these links.

    It is what the run that waited is held against: the same arithmetic as :func:`on_gpus`, beside a measurement.

    Raises:
        ValueError: the script has no layers, or ended within its second step.
    """
    if any(one.work is None or one.waited is None for one in seen):
        raise ValueError("the script ended within its second step, which --pace follows")
    if not all(one.work.layers for one in seen if one.work):
        raise ValueError("the script's model has no list of equal layers that could take a given time each")
    between = cluster.between_rate or ENDLESS
    device = Gpu("layers that wait", 0.0, ENDLESS, ENDLESS, cluster.inside_rate or ENDLESS, "this machine")
    machine = Machine(device, cluster.size, cluster.ranks_per_host, between, 0.0, 0.0, link_share=1.0)
    shares = {one.rank: _shares(one) for one in seen}
    later = set().union(*(_later(one) for one in seen))

    def exchange_s(call: Call) -> float | None:
        if _what(call) not in later:
            return None
        return seconds(call, machine) * (call.gloo_bytes / call.sent if call.sent else 1.0)  # by gloo's algorithm

    programs = {one.rank: (one.work.list, one.calls) for one in seen if one.work is not None}
    paced = replay(programs, lambda rank, one: shares[rank].get(id(one), 0.0), 0.0, exchange_s)
    alone = replay(programs, lambda rank, one: shares[rank].get(id(one), 0.0), 0.0, lambda call: None)
    layer_s = seen[0].waited.forward_s if seen[0].waited else 0.0
    return Paced("layers that wait", _links(machine), paced, max(one.step_s for one in alone), [], layer_s)


def _shares(one: Seen) -> dict[int, float]:
    """Seconds of each operation of a layer: of what its pass takes, in proportion to what a GPU would take for it."""
    assert one.work is not None
    assert one.waited is not None
    machine = Machine(gpu("A100-80GB"))
    passes: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for event in one.work.list:
        if isinstance(event, Operation):
            layer = next((name for name in one.work.layers if f"{event.module}.".startswith(f"{name}.")), "")
            if layer and event.phase in ("forward", "backward", "recomputed"):
                weight = event.bytes / machine.memory_bytes_per_s + event.flops / machine.matrix_flops
                passes[layer, event.phase].append((id(event), weight))
    shares: dict[int, float] = {}
    for (_, phase), events in passes.items():
        whole = sum(weight for _, weight in events) or 1.0
        seconds = one.waited.forward_s * (BACKWARD if phase == "backward" else 1) * one.cuts[1].backwards
        shares |= {event: seconds * weight / whole for event, weight in events}
    return shares


def seconds(call: Call, machine: Machine) -> float:
    """A collective's, by the algorithm that sends least, between ranks that are numbered host by host."""
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
    return machine.latency(n, stride) + call.nbytes / machine.rate(
        n, stride
    )  # one to all, or all to one, in a pipeline


def compute(machine: Machine, of_kind: Mapping[str, float]) -> Callable[[Operation], float]:
    """Seconds of an operation as the planner reckons them: a product's by its sizes and rate, the rest by its bytes."""

    def seconds(one: Operation) -> float:
        moving = one.bytes / machine.memory_bytes_per_s
        if not one.product:
            return moving
        lost = math.prod(1 + SMALL / size for size in one.sizes)
        return max(moving, one.flops * lost / of_kind[one.product])

    return seconds


def rates(kinds: Collection[str], tf32: bool, machine: Machine) -> tuple[dict[str, float], list[str]]:
    """Operations a second by kind of product, and what of it a reader should know.

    Raises:
        ValueError: products of fp32, whose rate on this GPU nobody has published.
    """
    of_kind = {"16": machine.matrix_flops, "attention16": machine.attention_flops}
    told = []
    if {"32", "attention32"} & set(kinds):
        if tf32:
            of_kind["32"] = TF32 * machine.matrix_flops
            told.append("products of fp32 as TF32, which the script allows")
        elif machine.gpu.name in FP32_TFLOPS:
            share = machine.matrix_flops / machine.gpu.flops
            of_kind["32"] = share * FP32_TFLOPS[machine.gpu.name] * 1e12
            told.append(
                f"products of fp32 without TF32, {FP32_TFLOPS[machine.gpu.name]:g} TFLOP/s by the datasheet, as torch "
                "has it unless it is told otherwise"
            )
        else:
            raise ValueError(f"the script multiplies in fp32, and nobody has published that rate of {machine.gpu.name}")
        of_kind["attention32"] = ATTENTION * of_kind["32"]
    return of_kind, told


def _later(one: Seen) -> set[tuple]:
    return {_what(call) for call in one.calls if call.step >= WARM} or {_what(call) for call in one.calls}


def _what(call: Call) -> tuple:
    return call.kind, call.group, call.ranks, call.place.line, call.place.use


def _links(machine: Machine) -> str:
    inside = f"{machine.gpu.link_bytes_per_s / 1e9:,.4g} GB/s a GPU inside a node"
    if machine.hosts == 1:
        return inside
    return f"{machine.hosts} nodes of {machine.host_gpus}: {inside}, {machine.between / 1e9:,.4g} GB/s a node between"
