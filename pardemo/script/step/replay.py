"""Predicts a step's time on named GPUs and links by replaying its recorded operations and collectives."""

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pardemo.cluster import Cluster
from pardemo.cluster.units import bytes_per_second, seconds
from pardemo.meters.timeline import Span, covered_s
from pardemo.planner.hardware import FP32_TFLOPS, LINKS, Gpu, gpu, link
from pardemo.planner.layouts.machines import ATTENTION, Machine
from pardemo.planner.layouts.programs import Program
from pardemo.script.runtime.collectives import Call
from pardemo.script.step.layer_padding import BACKWARD
from pardemo.script.step.operations import Operation, RecordedCollective, StepWork
from pardemo.script.step.rank_trace import WARM, RankTrace
from pardemo.script.step.summary import ReplayedStep, Summary, Times


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of ``--pace``: ``layer_s``, the time of a layer's forward, or 0 and the name of a ``gpu``.

    ``cluster``: of the run; a GPU's links limit no rank of this machine. ``between``, ``inside``: bytes/s of a GPU's.
    """

    layer_s: float
    gpu: str
    cluster: Cluster | None
    between: float | None = None
    inside: float | None = None


def read_replay_settings(pace: str, cluster: str | None, between: str | None, inside: str | None) -> ReplaySettings:
    """Reads what ``--pace`` asks for from the command's options.

    Raises:
        ValueError: neither a time nor a GPU that the planner knows; a cluster or a rate that is none.
    """
    if re.match(r"\s*[0-9.]+\s*(us|µs|ms|s)\s*$", pace):
        limited = None if cluster is None else cluster_of(cluster, between, inside)
        return ReplaySettings(seconds(pace, "--pace"), "", limited)
    try:
        name = gpu(pace).name
    except ValueError as error:
        raise ValueError(f"--pace is what a layer takes, as 20ms, or a GPU: {error}") from None
    if cluster is None:
        if between is not None:
            raise ValueError("--between is the rate between nodes: say how many, as --cluster 2x8")
        return ReplaySettings(0.0, name, None, None, _rate(inside))
    return ReplaySettings(0.0, name, cluster_of(cluster, None, None), _rate(between), _rate(inside))


def cluster_of(cluster: str, between: str | None, inside: str | None) -> Cluster:
    """Makes the cluster of ``2x4`` and its rates.

    Raises:
        ValueError: it is not nodes × ranks, or a rate is none.
    """
    hosts, x, host_ranks = cluster.lower().replace("×", "x").partition("x")
    if not (hosts.isdigit() and x and host_ranks.isdigit()):
        raise ValueError(f"--cluster is nodes × ranks on each, as 2x2, not {cluster!r}")
    return Cluster(int(hosts), int(host_ranks), between=between, inside=inside)


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    return link(text) if text in LINKS else bytes_per_second(text)


#: What all ranks of a collective have in common: group, ranks, its number among them.
Key = tuple[str, tuple[int, ...], int]
#: By rank its operations and exchanges, and all its calls.
Programs = Mapping[int, tuple[Sequence[Operation | RecordedCollective], Sequence[Call]]]
CommunicationTime = Callable[[Call], float | None]
ComputeTime = Callable[[int, Operation], float]


@dataclass
class CollectiveInFlight:
    """A collective in computed time: when each rank was ready, which one it follows on its connection, when it ends."""

    call: Call
    ready: dict[int, float] = field(default_factory=dict)
    before: list["CollectiveInFlight"] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float | None = None


@dataclass
class _Rank:
    """A rank's clocks in seconds: its processor's, its GPU's, when each operation ended, what it waited for."""

    rank: int
    program: Sequence[Operation | RecordedCollective]
    calls: Sequence[Call]
    at: int = 0
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    ended: list[float] = field(default_factory=list)
    collectives: list[CollectiveInFlight] = field(default_factory=list)
    last: dict[tuple, CollectiveInFlight] = field(default_factory=dict)
    stands: list[CollectiveInFlight] = field(default_factory=list)
    busy_s: float = 0.0
    bytes_s: float = 0.0
    late_s: float = 0.0


class _Replay:
    """Replays all ranks' programs together; arguments as of :func:`replay_step`."""

    def __init__(self, programs: Programs, compute_s: ComputeTime, launch_s: float, communicate_s: CommunicationTime):
        self.ranks = [_Rank(rank, program, calls) for rank, (program, calls) in sorted(programs.items())]
        self._collectives: dict[Key, CollectiveInFlight] = {}
        self._compute_s, self._launch_s, self._communicate_s = compute_s, launch_s, communicate_s

    def run(self) -> None:
        """Replays every rank as far as it can go, until none can go further."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while rank.at < len(rank.program) and self._replay_next(rank):
                    rank.at, moved = rank.at + 1, True

    def _replay_next(self, rank: _Rank) -> bool:
        """Replays a rank's next event; False where it has to wait for another rank."""
        event = rank.program[rank.at]
        awaited = [*(rank.collectives[number] for number in event.after), *rank.stands]
        if any(self.end_s(collective) is None for collective in awaited):
            return False
        if isinstance(event, RecordedCollective):
            self._begin(rank, event, awaited)
        else:
            self._compute(rank, event, awaited)
        return True

    def _compute(self, rank: _Rank, event: Operation, awaited: list[CollectiveInFlight]) -> None:
        rank.stands = []
        rank.cpu_s += self._launch_s
        begin = max(rank.gpu_s, rank.cpu_s)
        for collective in sorted(awaited, key=lambda call: call.end_s or 0.0):
            until = max(begin, collective.end_s or 0.0)
            late = min(max(collective.begin_s - begin, 0.0), until - begin)
            rank.late_s, rank.bytes_s = rank.late_s + late, rank.bytes_s + until - begin - late
            begin = until
        seconds = self._compute_s(rank.rank, event)
        rank.busy_s += seconds
        rank.gpu_s = begin + seconds
        rank.ended.append(rank.gpu_s)
        if event.read:
            rank.cpu_s = rank.gpu_s

    def _begin(self, rank: _Rank, event: RecordedCollective, awaited: list[CollectiveInFlight]) -> None:
        call = rank.calls[event.call]
        if self._communicate_s(call) is None:
            rank.collectives.append(CollectiveInFlight(call, end_s=0.0))
            return
        collective = self._collectives.setdefault((call.group, call.ranks, call.number), CollectiveInFlight(call))
        rank.cpu_s += self._launch_s
        sends = rank.ended[event.operations - 1] if event.operations else 0.0
        collective.ready[rank.rank] = max([rank.cpu_s, sends, *(earlier.end_s or 0.0 for earlier in awaited)])
        line = (call.group, call.ranks, call.kind in ("send", "receive"))
        if line in rank.last and not any(rank.last[line] is earlier for earlier in collective.before):
            collective.before.append(rank.last[line])
        rank.last[line] = collective
        rank.collectives.append(collective)
        if event.waits:
            rank.stands.append(collective)

    def end_s(self, collective: CollectiveInFlight) -> float | None:
        """Returns when a collective ends; None as long as not all its ranks have begun it."""
        if collective.end_s is None:
            before = [self.end_s(earlier) for earlier in collective.before]
            if not set(collective.call.ranks) <= set(collective.ready) or None in before:
                return None
            begin_s = collective.begin_s = max(collective.ready.values())
            collective.end_s = max([begin_s, *(end for end in before if end)]) + self.communicate_s(collective)
        return collective.end_s

    def communicate_s(self, collective: CollectiveInFlight) -> float:
        """Returns the seconds of a collective."""
        return self._communicate_s(collective.call) or 0.0

    def times(self, rank: _Rank) -> Times:
        """Returns the seconds of a rank's step by kind."""
        ends = [self.end_s(collective) or 0.0 for collective in rank.collectives]
        step = max([rank.gpu_s, rank.cpu_s, *ends])
        begins = [end - self.communicate_s(collective) for collective, end in zip(rank.collectives, ends, strict=True)]
        spans = [Span(rank.rank, "", "", begin, end) for begin, end in zip(begins, ends, strict=True)]
        exposed, late = rank.bytes_s + max(0.0, step - max(rank.gpu_s, rank.cpu_s)), rank.late_s
        hidden = max(covered_s(spans) - exposed, 0.0)
        return Times(rank.rank, step, rank.busy_s, exposed, hidden, late, max(step - rank.busy_s - exposed - late, 0.0))


def replay_step(
    programs: Programs, compute_s: ComputeTime, launch_s: float, communicate_s: CommunicationTime
) -> list[Times]:
    """Predicts each rank's step.

    A rank's GPU does its operations in their order, each when the processor has launched it and the collectives are
    over whose results it uses. A collective begins on all its ranks together, when the last one has what it sends;
    those of one group follow one another. The processor does not wait, but where the script reads a result.

    Args:
        programs: by rank its operations and exchanges, and all its calls.
        compute_s: of an operation on a rank. launch_s: the processor's, of an operation.
        communicate_s: of a collective; None of one that later steps do not have.

    Raises:
        ValueError: the step does not come to its end: ranks wait for one another for ever.
    """
    replayed = _Replay(programs, compute_s, launch_s, communicate_s)
    replayed.run()
    for rank in replayed.ranks:
        if rank.at < len(rank.program):
            event = rank.program[rank.at]
            awaited = [*(rank.collectives[number] for number in event.after), *rank.stands]
            calls = [collective.call for collective in awaited if collective.end_s is None]
            by_kind = {kind: {c.place.line: 0 for c in calls if c.kind == kind} for kind in {c.kind: 0 for c in calls}}
            lines_text = "; ".join(f"{kind} at {', '.join(lines)}" for kind, lines in by_kind.items())
            raise ValueError(f"rank {rank.rank} waits for ever for {lines_text}")
    return [replayed.times(rank) for rank in replayed.ranks]


#: Of a processor, for one operation from Python: 24 layers of width 1,024, some 3,200 operations, take 79 ms on an A100
#: whether a micro-batch has one sample or nearly two (vTrain's measurements).
LAUNCH_S = 24e-6
#: What a product loses of its rows, depth and columns to tiles that are not full: the planner's, of any program.
SMALL = Program("any").tile_loss
#: TF32's rate of the datasheets, as a share of that of 16 bits.
TF32 = 0.5
ENDLESS = 1e30  # operations or bytes a second: takes no time


def add_predicted_step(asked: ReplaySettings, measured: Summary, seen: Sequence[RankTrace]) -> None:
    """Adds the predicted times that were asked for to the summary.

    Raises:
        ValueError: layers compute longer here than they are to take; what :func:`on_gpus` raises.
    """
    if asked.gpu:
        host_ranks = asked.cluster.ranks_per_host if asked.cluster else measured.ranks
        machine = devices(asked.gpu, measured.ranks, host_ranks, asked.between, asked.inside)
        measured.predicted = on_gpus(seen, machine)
        return
    own_s = {
        name: statistics.median(of_passes[len(of_passes) // 2 :])  # not the first steps, whose operators are followed
        for trace in seen
        if trace.padded
        for name, of_passes in trace.padded.computed_s.items()
    }
    if own_s and max(own_s.values()) > asked.layer_s:
        name = max(own_s, key=own_s.__getitem__)
        raise ValueError(
            f"a layer cannot take {1e3 * asked.layer_s:g} ms here: {name} computes {1e3 * own_s[name]:.1f} ms "
            "by itself; give --pace more, or make the layers smaller"
        )
    measured.predicted = on_layers(seen, asked.cluster or Cluster(1, measured.ranks))


def devices(name: str, ranks: int, host_ranks: int, between: float | None, inside: float | None) -> Machine:
    """Makes a machine of named GPUs, one a rank. between, inside: bytes/s of a host's network card, of a GPU's link.

    Raises:
        ValueError: there is no such GPU.
    """
    device = gpu(name)
    if inside is not None:
        device = replace(device, link_bytes_per_s=inside)
    return Machine(device, ranks, host_ranks, **({} if between is None else {"between": between}))


def on_gpus(seen: Sequence[RankTrace], machine: Machine) -> ReplayedStep:
    """Predicts the second step of all ranks on GPUs.

    Raises:
        ValueError: nothing was recorded; the GPU's rate for the script's products is not known; ranks wait for one
            another for ever, where messages wait for their receiver, as nccl's do.
    """
    works = _works(seen)
    kinds = {event.product for work in works.values() for event in work.list if isinstance(event, Operation)}
    of_kind, assumed = gpu_rates(kinds, any(work.tf32 for work in works.values()), machine)
    on_gpu = operation_s(machine, of_kind)
    assumed.append(
        f"{1e6 * LAUNCH_S:.0f} µs of a processor for each operation, as eager PyTorch takes on published runs; what "
        "else the script's Python does, data and files take no time"
    )
    if any("compile" in note for trace in seen for note in trace.notes):
        assumed.append("operations one by one: torch.compile would launch fewer")

    def communicate_s(call: Call) -> float:
        return collective_s(call, machine)

    return _predict(seen, machine, lambda _, operation: on_gpu(operation), LAUNCH_S, communicate_s, assumed)


def _works(seen: Sequence[RankTrace]) -> dict[int, StepWork]:
    """Returns the operations of each rank's second step."""
    works = {trace.rank: trace.work for trace in seen if trace.work is not None}
    if len(works) < len(seen):
        raise ValueError("the script ended within its second step, which --pace follows")
    return works


def _predict(
    seen: Sequence[RankTrace], machine: Machine, compute_s: ComputeTime, launch_s: float,
    communicate_s: Callable[[Call], float], assumed: list[str],
) -> ReplayedStep:  # fmt: skip
    """Predicts the second step of all ranks, and the same step with collectives that take no time.

    A collective that no later step has takes none.
    """
    later = set().union(*(_later(trace) for trace in seen))
    calls = {trace.rank: trace.calls for trace in seen}
    programs = {rank: (work.list, calls[rank]) for rank, work in _works(seen).items()}
    with_links = replay_step(
        programs, compute_s, launch_s, lambda call: communicate_s(call) if _call_key(call) in later else None
    )
    alone = replay_step(programs, compute_s, launch_s, lambda call: None)
    return ReplayedStep(machine.gpu.name, _links(machine), with_links, max(run.step_s for run in alone), assumed)


def on_layers(seen: Sequence[RankTrace], cluster: Cluster) -> ReplayedStep:
    """Predicts the second step of all ranks with these links, layers of the given time, and no time for all else.

    It is what the run with padded layers is held against: the same arithmetic as :func:`on_gpus`, beside a measurement.

    Raises:
        ValueError: the script has no layers, or ended within its second step.
    """
    if not all(work.layers for work in _works(seen).values()):
        raise ValueError("the script's model has no list of equal layers that could take a given time each")
    between = cluster.between_rate or ENDLESS
    device = Gpu("layers that wait", 0.0, ENDLESS, ENDLESS, cluster.inside_rate or ENDLESS, "this machine")
    machine = Machine(device, cluster.size, cluster.ranks_per_host, between, 0.0, 0.0, link_share=1.0)
    shares = {trace.rank: _shares(trace) for trace in seen}

    def communicate_s(call: Call) -> float:
        return collective_s(call, machine) * (call.gloo_bytes / call.sent if call.sent else 1.0)  # by gloo's algorithm

    def compute_s(rank: int, operation: Operation) -> float:
        return shares[rank].get(id(operation), 0.0)

    predicted = _predict(seen, machine, compute_s, 0.0, communicate_s, [])
    return replace(predicted, layer_s=seen[0].padded.forward_s if seen[0].padded else 0.0)


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
        seconds = trace.padded.forward_s * (BACKWARD if phase == "backward" else 1) * trace.cuts[1].backwards
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
        lost = math.prod(1 + SMALL / size for size in operation.sizes)
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
    return {_call_key(call) for call in trace.calls if call.step >= WARM} or {_call_key(call) for call in trace.calls}


def _call_key(call: Call) -> tuple:
    return call.kind, call.group, call.ranks, call.place.line, call.place.use


def _links(machine: Machine) -> str:
    inside = f"{machine.gpu.link_bytes_per_s / 1e9:,.4g} GB/s a GPU inside a node"
    if machine.hosts == 1:
        return inside
    return f"{machine.hosts} nodes of {machine.host_gpus}: {inside}, {machine.between / 1e9:,.4g} GB/s a node between"
