"""Follows an unchanged script on each rank for some steps, and sums up the median step of all ranks."""

import contextlib
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch.distributed as dist

from pardemo.meters.snapshot import Block
from pardemo.meters.timeline import Span, covered_s
from pardemo.meters.wire import connections, kernel_counts
from pardemo.script.runtime import job
from pardemo.script.runtime.call_sites import CONTEXT, CallSite, CallSites
from pardemo.script.runtime.collectives import Call, Calls
from pardemo.script.runtime.job import as_main, in_job
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.runtime.steps import StepEnd, Steps
from pardemo.script.step import parallelisms
from pardemo.script.step.operations import LayerPadding, OperationRecorder, PaddedTimes, StepWork
from pardemo.script.step.parallelisms import Parallelism, describe_model, recognised, with_terms
from pardemo.script.step.script_memory import ScriptMemoryMeter, Trained
from pardemo.script.step.shapes import Shapes
from pardemo.script.words import count_text

#: Steps before those that are measured: in the first an optimizer makes its states, in the second DDP its buckets anew
#: while memory is followed, and with the third's backward pass nothing is followed any more but collectives.
MEMORY_STEP = 2
WARM = 3


@dataclass(frozen=True)
class Program:
    """A script to run: what a launcher would start (with an absolute path), how many steps, and where it writes."""

    launch: Launch
    steps: int
    folder: str
    journals: str
    work: bool = False
    layer_s: float = 0.0


class Memory(NamedTuple):
    """The peak of the second step: bytes, bytes by kind, the line that reached it, and its largest tensors."""

    peak_bytes: int
    kinds: dict[str, int]
    line: str
    largest: list[dict[str, Any]]
    blocks: list[Block]


@dataclass(frozen=True)
class RankTrace:
    """What was recorded on one rank. ``ended``: after ``enough`` steps, or at the script's own ``end``.

    ``notes``: what ran in another way than it was written. ``wire``: whether the kernel counted bytes. ``work``: the
    second step's operations, where they were asked for. ``padded``: of layers that take a given time. ``started``:
    processes of the script's own, in which nothing is followed.
    """

    rank: int
    ended: str
    cuts: list[StepEnd]
    calls: list[Call]
    waits: list[tuple[float, float]]
    parallelisms: list[Parallelism]
    model: dict[str, Any]
    notes: list[str]
    memory: Memory
    wire: bool
    backend: str
    work: StepWork | None = None
    padded: PaddedTimes | None = None
    started: tuple[str, ...] = ()


def follow_script(program: Program) -> RankTrace:
    """Runs the script on this rank, whose World's group is given up for the script's own."""

    def follow(rank: int, port: int, notes: list[str]) -> RankTrace:
        return _ScriptFollower(program, rank, port).follow(lambda: as_main(program.launch), notes)

    return in_job(program.launch, program.folder, follow)


class _ScriptFollower:
    """Follows a script's steps and collectives, and in its first steps its memory, tensor by tensor."""

    def __init__(self, program: Program, rank: int, port: int):
        self._rank, self._ports, self._enough = rank, {port}, WARM + program.steps
        self._wire = kernel_counts()
        self._sites = CallSites()
        self._shapes = Shapes(self._sites, lambda: self._steps.number)
        self._held = ScriptMemoryMeter(self._sites)
        self._trained = Trained(self._sites)
        self._following = contextlib.ExitStack()
        self._steps = Steps(self._sites, self._enough, self._counters, self._on_cut, self._on_backward)
        journal = os.path.join(program.journals, f"rank{rank}")
        self._calls = Calls(self._sites, lambda: self._steps.number, journal, self._on_tensors)
        self._calls.on_wait = self._on_wait
        self._sites.on_raise = self._steps.on_raise = self._calls.raised
        self._work = OperationRecorder(self._sites, lambda: self._calls.list) if program.work else None
        self._step_work: StepWork | None = None
        self._padding = LayerPadding(program.layer_s) if program.layer_s else None
        self._memory: Memory | None = None
        self._parallelisms: list[Parallelism] = []
        self._model: dict[str, Any] = {}
        self._backend = ""

    def follow(self, script: Callable[[], str], notes: list[str]) -> RankTrace:
        """Runs the script to its end, or to the end of the steps that were asked for."""
        padding = self._padding or contextlib.nullcontext()
        stores, started = job.store_ports_noted(self._ports), list[str]()
        with contextlib.ExitStack() as stack:
            followed = (self._sites, self._shapes, self._steps, self._calls, padding, self._following)
            for follower in (stores, job.processes_noted(started), *followed):
                stack.enter_context(follower)  # type: ignore[arg-type]
            if self._work is not None:
                self._following.enter_context(self._work)  # below the meter of memory, which passes operations on
            self._following.enter_context(self._held)
            self._following.enter_context(self._trained)
            ended = self._calls.to_the_end(script)
        parallelisms = with_terms(self._parallelisms, self._shapes, WARM, self._held.vocabularies)
        return RankTrace(
            self._rank, ended, self._steps.cuts, self._calls.list, self._calls.waits, parallelisms, self._model,
            notes, self._memory or _memory(self._held), self._wire and "nccl" not in self._backend,
            self._backend, self._step_work, self._padding.seen if self._padding else None,
            tuple(dict.fromkeys(started)),
        )  # fmt: skip

    def _on_cut(self, number: int) -> None:
        if number == 1:
            self._held.begin()
            if self._work is not None:
                self._work.begin()
        elif number == MEMORY_STEP:
            self._memory = _memory(self._held)
            if self._work is not None:
                self._step_work = self._work.step(self._sites.roots)
        elif number in (WARM, self._enough):  # a script that ends by itself takes its groups down before
            self._look()

    def _on_backward(self) -> None:
        if self._memory is not None:
            self._following.close()  # not at the cut: torch goes through its hooks there, and some are the meter's

    def _on_wait(self) -> None:
        if self._work is not None and self._memory is None:
            self._work.note_wait()

    def _on_tensors(self, *tensors: Any) -> None:
        if self._memory is None:
            self._held.used(*tensors)

    def _look(self) -> None:
        """Looks at the script's models and groups while they exist."""
        self._parallelisms = recognised(self._sites, self._shapes)
        self._model = describe_model(self._sites) | {
            "vocabularies": sorted(self._held.vocabularies), "trained": self._trained.seen()
        }  # fmt: skip
        self._backend = str(dist.get_backend()) if dist.is_initialized() else ""

    def _counters(self) -> tuple[int, int]:
        """Reads the kernel's byte counts of this process's connections, without those to stores of ranks."""
        if not self._wire:
            return 0, 0
        ends = [end for end in connections() if not self._ports & {end.local[1], end.peer[1]}]
        return sum(end.sent_bytes for end in ends), sum(end.received_bytes for end in ends)


def _memory(held: ScriptMemoryMeter) -> Memory:
    kinds, alive = held.at_peak()
    largest = [
        {
            "kind": kind, "bytes": life.nbytes, "shape": life.shape, "dtype": life.dtype, "line": life.place.line,
            "module": life.place.module,
        }
        for kind, life in alive[:5]
    ]  # fmt: skip
    blocks = [
        Block(life.nbytes, kind, life.place.line, life.place.module, life.born, life.died, life.place.phase)
        for kind, life in held.all()
        if life.nbytes
    ]
    return Memory(sum(kinds.values()), kinds, held.peak_place.line if held.peak_place else "", largest, blocks)


@dataclass
class Row:
    """Collectives of one kind, group and place: their number in the median step, and the bytes that a rank sends.

    ``bytes``: by an algorithm that sends the least, of the rank that sends most: ``rank``, where not all send as much.
    ``expected_bytes``: what the formula of the parallelism says, where one does; ``why``: what the row is, or why it
    differs.
    """

    kind: str
    ranks: tuple[int, ...]
    calls: float
    bytes: float
    place: CallSite
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    expected_bytes: float | None = None
    why: str = ""
    rank: int | None = None

    @property
    def line(self) -> str:
        return self.place.line

    @property
    def module(self) -> str:
        return self.place.module


@dataclass(frozen=True)
class Times:
    """Seconds of a rank's median step; computation is what its thread had of a core.

    ``exposed_s``: communication that it waited for; ``hidden_s``: communication while it computed; ``idle_s``: waiting
    for ranks that came later; ``other_s``: neither (files, sleep, another process on the core).
    """

    rank: int
    step_s: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    idle_s: float
    other_s: float

    @property
    def figures(self) -> tuple[float, ...]:
        """The step, and what it consists of, in the order of the reports' columns."""
        return self.step_s, self.compute_s, self.exposed_s, self.hidden_s, self.idle_s, self.other_s


@dataclass(frozen=True)
class PredictedStep:
    """A step's predicted time on other devices. ``on``: which; ``links``: between which ranks, at which rates.

    ``time``: by rank. ``alone_s``: the step of a rank whose collectives took no time. ``layer_s``: what a layer took,
    in a run whose layers were padded.
    """

    on: str
    links: str
    time: list[Times]
    alone_s: float
    assumed: list[str]
    layer_s: float = 0.0

    @property
    def step_s(self) -> float:
        return max(rank_times.step_s for rank_times in self.time)

    def as_json(self) -> dict[str, Any]:
        made = {"time": [vars(rank_times) for rank_times in self.time], "layer_s": self.layer_s or None}
        return vars(self) | made | {"reckoned": True, "step_s": self.step_s}


@dataclass(frozen=True)
class Finding:
    """Something that a reader would change: what, where, and how many bytes a step it is about."""

    what: str
    line: str = ""
    bytes: float = 0.0


@dataclass
class Summary:
    """A script's median step on all ranks."""

    ranks: int
    steps: int
    micro_batches: int
    ended: str
    backend: str
    parallelism: list[Parallelism]
    model: dict[str, Any]
    collectives: list[Row]
    sent_bytes: list[float]
    wire_bytes: list[float] | None
    gloo_bytes: list[float]
    memory: dict[str, Any]
    time: list[Times]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    predicted: PredictedStep | None = None
    hosts: int = 1
    closures: int = 1  # how often a step calls the optimizer's

    def as_json(self) -> dict[str, Any]:
        """Returns the summary for JSON, with bytes and seconds of a step."""
        left_out = ("place", "shapes", "closures", "gloo_bytes")

        def plain(thing: object) -> dict[str, Any]:
            fields = vars(thing).items()
            return {"paced" if name == "predicted" else name: value for name, value in fields if name not in left_out}

        return plain(self) | {
            "parallelism": [parallelism.as_json() for parallelism in self.parallelism],
            "groups": [
                {"kind": kind.name, "groups": kind.groups} for kind in parallelisms.groups_by_kind(self.parallelism)
            ],
            "collectives": [
                plain(row) | {"line": row.line, "module": row.module, "phase": row.place.phase}
                for row in self.collectives
            ],
            "backend_bytes": self.gloo_bytes,
            "time": [plain(rank_times) for rank_times in self.time],
            "paced": None if self.predicted is None else self.predicted.as_json(),
            "findings": [plain(finding) for finding in self.findings],
        }


def summarize(seen: Sequence[RankTrace]) -> Summary:
    """Sums up the median step of all ranks.

    Raises:
        ValueError: no step is left to be measured.
    """
    counts = [len(trace.cuts) for trace in seen]
    last = min(counts)
    if last <= WARM:
        raise ValueError(_too_few(seen, last))
    steps = range(WARM, last)
    begun = last_begun(seen)
    fullest = max(seen, key=lambda rank: rank.memory.peak_bytes)
    wire = [
        typical([trace.cuts[step].sent_bytes - trace.cuts[step - 1].sent_bytes for step in steps]) for trace in seen
    ]
    memory = {name: value for name, value in fullest.memory._asdict().items() if name != "blocks"}
    return Summary(
        ranks=len(seen),
        steps=len(steps),
        micro_batches=round(statistics.median(seen[0].cuts[step].micro_batches for step in steps)),
        ended=seen[0].ended,
        backend=seen[0].backend,
        parallelism=_parallelisms(seen),
        model=seen[0].model,
        collectives=_rows(seen, steps),
        sent_bytes=[_median_sum(trace.calls, steps, "sent") for trace in seen],
        wire_bytes=wire if all(trace.wire for trace in seen) else None,
        gloo_bytes=[_median_sum(trace.calls, steps, "gloo_bytes") for trace in seen],
        memory={"rank": fullest.rank} | memory,
        time=[_times_of(trace, steps, begun) for trace in seen],
        notes=sorted({note for trace in seen for note in trace.notes}),
        closures=max(1, round(statistics.median(seen[0].cuts[step].closures for step in steps))),
    )  # fmt: skip


def _too_few(seen: Sequence[RankTrace], cuts: int) -> str:
    if cuts:
        return f"the script ended after {count_text(cuts, 'step')}: {WARM} warm it up, and one more has to be there"
    none = "the script ended without a step of an optimizer after a backward pass: there is no step to measure"
    if started := next((trace.started for trace in seen if trace.started), ()):
        none += f". It started processes of its own, which are not followed ({started[0]}): measure what they run"
    return none


def _parallelisms(seen: Sequence[RankTrace]) -> list[Parallelism]:
    """Lists each parallelism of each group once; only its calls show torch's context parallelism."""
    by_groups: dict[tuple[str, tuple[int, ...], tuple[str, ...]], Parallelism] = {}
    for trace in seen:
        for parallelism in trace.parallelisms:
            key = parallelism.kind, parallelism.ranks, parallelism.wraps
            if (known := by_groups.setdefault(key, parallelism)) is not parallelism and "replicas" in known.options:
                both = dict.fromkeys((*known.options["replicas"], *parallelism.options["replicas"]))
                by_groups[key] = replace(known, options=known.options | {"replicas": tuple(both)})
    context = {call.ranks for trace in seen for call in trace.calls if call.place.use == CONTEXT}
    there = {p.ranks for p in by_groups.values() if p.kind == "CP"}
    cut = [Parallelism("CP", ranks, ("attention",), {}, {"by": "torch"}) for ranks in sorted(context - there)]
    return [*by_groups.values(), *cut]


def _median_sum(calls: Iterable[Call], steps: Iterable[int], field: str) -> float:
    sums: dict[int, float] = defaultdict(float)
    for call in calls:
        sums[call.step] += getattr(call, field)
    return typical([sums[step] for step in steps])


def typical(of_steps: Sequence[float]) -> float:
    """Returns the median over the steps, or where it is 0 the mean: some things are done every few steps."""
    return statistics.median(of_steps) or statistics.fmean(of_steps)


def _rows(seen: Sequence[RankTrace], steps: range) -> list[Row]:
    """Makes rows of the calls of each group's first rank, with the most bytes that a rank sends by them.

    Of a gather, a reduction to one rank or an uneven all-to-all not all ranks send as much.
    """
    sent_by: dict[tuple, dict[int, float]] = defaultdict(dict)
    for trace in seen:
        for call in trace.calls:
            if call.kind != "receive":
                sent_by[call.group, call.ranks, call.number][trace.rank] = call.sent
    kept: dict[tuple, list[Call]] = defaultdict(list)
    for trace in seen:
        for call in trace.calls:
            if call.step in steps and call.kind != "receive" and call.ranks and call.ranks[0] == trace.rank:
                kept[call.kind, call.ranks, call.place, call.dtype].append(call)
    rows = []
    for (kind, ranks, place, dtype), calls in kept.items():
        number = statistics.median(sum(call.step == step for call in calls) for step in steps)
        sums: dict[int, dict[int, float]] = defaultdict(lambda: dict.fromkeys(steps, 0.0))
        for call in calls:
            for rank, by in sent_by[call.group, call.ranks, call.number].items():
                sums[rank][call.step] += by
        medians = {rank: typical(list(by_step.values())) for rank, by_step in sums.items()}
        most = max(medians, key=lambda rank: (medians[rank], -rank))
        uneven = most if kind != "send" and min(medians.values()) < 0.9 * medians[most] else None
        shapes = tuple(dict.fromkeys(shape for call in calls for shape in call.shapes))
        made = Row(kind, ranks, number or len(calls) / len(steps), medians[most], place, dtype, shapes)
        rows.append(replace(made, rank=uneven))
    return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.ranks))


def last_begun(seen: Sequence[RankTrace]) -> dict[tuple[str, tuple[int, ...], int], float]:
    """Returns when the last rank began each collective, and the sender each message.

    By the group, the group's ranks (of a message sender and receiver), and its number among theirs.
    """
    begun: dict[tuple[str, tuple[int, ...], int], float] = {}
    for trace in seen:
        for call in trace.calls:
            if call.kind != "receive":
                key = call.group, call.ranks, call.number
                begun[key] = max(begun.get(key, 0.0), call.begin_s)
    return begun


def _times_of(trace: RankTrace, steps: range, begun: dict[tuple[str, tuple[int, ...], int], float]) -> Times:
    rows = []
    for step in steps:
        before, cut = trace.cuts[step - 1], trace.cuts[step]
        evaluated = [(evaluation.begin_s, evaluation.end_s) for evaluation in cut.evaluations]
        wall = cut.at_s - before.at_s - sum(end - begin for begin, end in evaluated)
        padding = [wait for wait in trace.padded.waits if before.at_s <= wait[0] < cut.at_s] if trace.padded else []
        compute = cut.cpu_s - before.cpu_s - sum(evaluation.cpu_s for evaluation in cut.evaluations)
        compute += sum(end - begin for begin, end in padding)
        compute = min(max(compute, 0.0), wall)
        calls = [call for call in trace.calls if call.step == step and not _is_within(call.begin_s, evaluated)]
        flights = [(call.begin_s, call.end_s or call.begin_s) for call in calls]
        stood = [
            wait for wait in trace.waits if before.at_s <= wait[0] < cut.at_s and not _is_within(wait[0], evaluated)
        ]
        waits = waiting_spans(calls, stood, begun)
        communication, late = (covered_s(_spans(trace.rank, some)) for some in ([*flights, *stood], waits))
        blocked = wall - compute
        idle = min(late, blocked)
        exposed = min(blocked - idle, max(communication - late, 0.0))
        rows.append((wall, compute, exposed, max(communication - exposed - idle, 0.0), idle, blocked - idle - exposed))
    return Times(trace.rank, *sorted(rows)[(len(rows) - 1) // 2])  # of one step, so that its parts add up to it


def _is_within(at_s: float, spans: Iterable[tuple[float, float]]) -> bool:
    return any(begin <= at_s <= end for begin, end in spans)


def waiting_spans(
    calls: Iterable[Call],
    stood: Sequence[tuple[float, float]],
    begun: dict[tuple[str, tuple[int, ...], int], float],
) -> list[tuple[float, float]]:
    """Returns the spans in which a rank waited for a collective's last rank, or for a message's sender.

    Args:
        stood: when it stood still in a Work's ``wait``: a message's end is told by no backend. begun: of
            :func:`last_begun`.
    """
    waits = []
    for call in calls:
        there = begun.get((call.group, call.ranks, call.number), 0.0)
        if call.kind == "receive":
            waits += [(max(begin, call.begin_s), min(end, there)) for begin, end in stood]
        else:
            waits.append((call.begin_s, min(there, call.end_s or call.begin_s)))
    return waits


def _spans(rank: int, times: Iterable[tuple[float, float]]) -> list[Span]:
    return [Span(rank, "", "", begin, max(begin, end)) for begin, end in times]
