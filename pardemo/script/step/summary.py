"""Sums up the median step of all ranks of a script."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pardemo.meters.timeline import Span, covered_s
from pardemo.script.runtime.call_sites import CONTEXT, CallSite
from pardemo.script.runtime.collectives import Call
from pardemo.script.step import WARM_UP_STEPS
from pardemo.script.step.group_kinds import groups_by_kind
from pardemo.script.step.parallelism import CutOptions, Fsdp2Options, Parallelism
from pardemo.script.step.rank_trace import RankTrace
from pardemo.script.words import count_text


@dataclass
class CollectiveRow:
    """Collectives of one kind, group and call site: their number in the median step, and the bytes that a rank sends.

    ``bytes``: by an algorithm that sends the least, of the rank that sends most: ``rank``, where not all send as much.
    ``expected_bytes``: what the formula of the parallelism says, where one does; ``why``: what the row is, or why it
    differs.
    """

    kind: str
    ranks: tuple[int, ...]
    calls: float
    bytes: float
    site: CallSite
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    expected_bytes: float | None = None
    why: str = ""
    rank: int | None = None

    @property
    def line(self) -> str:
        return self.site.line

    @property
    def module(self) -> str:
        return self.site.module


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
class PacedStep:
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
        plain = {"time": [vars(rank_times) for rank_times in self.time], "layer_s": self.layer_s or None}
        return vars(self) | plain | {"reckoned": True, "step_s": self.step_s}


@dataclass(frozen=True)
class StepFinding:
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
    collectives: list[CollectiveRow]
    sent_bytes: list[float]
    wire_bytes: list[float] | None
    gloo_bytes: list[float]
    memory: dict[str, Any]
    time: list[Times]
    findings: list[StepFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paced: PacedStep | None = None
    hosts: int = 1
    closures: int = 1  # how often a step calls the optimizer's

    def as_json(self) -> dict[str, Any]:
        """Returns the summary for JSON, with bytes and seconds of a step."""
        left_out = ("site", "shapes", "closures", "gloo_bytes")

        def plain(thing: object) -> dict[str, Any]:
            return {name: value for name, value in vars(thing).items() if name not in left_out}

        return plain(self) | {
            "parallelism": [parallelism.as_json() for parallelism in self.parallelism],
            "groups": [{"kind": kind.name, "groups": kind.groups} for kind in groups_by_kind(self.parallelism)],
            "collectives": [
                plain(row) | {"line": row.line, "module": row.module, "phase": row.site.phase}
                for row in self.collectives
            ],
            "backend_bytes": self.gloo_bytes,
            "time": [plain(rank_times) for rank_times in self.time],
            "paced": None if self.paced is None else self.paced.as_json(),
            "findings": [plain(finding) for finding in self.findings],
        }


def summarize(traces: Sequence[RankTrace]) -> Summary:
    """Sums up the median step of all ranks.

    Raises:
        ValueError: no step is left to be measured.
    """
    counts = [len(trace.cuts) for trace in traces]
    last = min(counts)
    if last <= WARM_UP_STEPS:
        raise ValueError(_too_few(traces, last))
    steps = range(WARM_UP_STEPS, last)
    begun = last_begun(traces)
    fullest = max(traces, key=lambda rank: rank.memory.peak_bytes)
    wire = [
        typical([trace.cuts[step].sent_bytes - trace.cuts[step - 1].sent_bytes for step in steps]) for trace in traces
    ]
    memory = {name: value for name, value in fullest.memory._asdict().items() if name != "blocks"}
    return Summary(
        ranks=len(traces),
        steps=len(steps),
        micro_batches=round(statistics.median(traces[0].cuts[step].micro_batches for step in steps)),
        ended=traces[0].ended,
        backend=traces[0].backend,
        parallelism=_parallelisms(traces),
        model=traces[0].model,
        collectives=_rows(traces, steps),
        sent_bytes=[_median_sum(trace.calls, steps, "sent") for trace in traces],
        wire_bytes=wire if all(trace.wire for trace in traces) else None,
        gloo_bytes=[_median_sum(trace.calls, steps, "gloo_bytes") for trace in traces],
        memory={"rank": fullest.rank} | memory,
        time=[_times_of(trace, steps, begun) for trace in traces],
        notes=sorted({note for trace in traces for note in trace.notes}),
        closures=max(1, round(statistics.median(traces[0].cuts[step].closures for step in steps))),
    )  # fmt: skip


def _too_few(traces: Sequence[RankTrace], cuts: int) -> str:
    if cuts:
        there = f"the script ended after {count_text(cuts, 'step')}"
        return f"{there}: {WARM_UP_STEPS} warm it up, and one more has to be there"
    none = "the script ended without a step of an optimizer after a backward pass: there is no step to measure"
    if started := next((trace.started for trace in traces if trace.started), ()):
        none += f". It started processes of its own, which are not followed ({started[0]}): measure what they run"
    return none


def _parallelisms(traces: Sequence[RankTrace]) -> list[Parallelism]:
    """Lists each parallelism of each group once; only its calls show torch's context parallelism."""
    by_groups: dict[tuple[str, tuple[int, ...], tuple[str, ...]], Parallelism] = {}
    for trace in traces:
        for parallelism in trace.parallelisms:
            key = parallelism.kind, parallelism.ranks, parallelism.wraps
            known = by_groups.setdefault(key, parallelism)
            if known is not parallelism and isinstance(known.options, Fsdp2Options):
                replicas = dict.fromkeys((*known.options.replicas, *parallelism.options.replicas))
                by_groups[key] = replace(known, options=replace(known.options, replicas=tuple(replicas)))
    context = {call.ranks for trace in traces for call in trace.calls if call.site.use == CONTEXT}
    recognised = {p.ranks for p in by_groups.values() if p.kind == "CP"}
    cut = [Parallelism("CP", ranks, ("attention",), {}, CutOptions("torch")) for ranks in sorted(context - recognised)]
    return [*by_groups.values(), *cut]


def _median_sum(calls: Iterable[Call], steps: Iterable[int], field: str) -> float:
    sums: dict[int, float] = defaultdict(float)
    for call in calls:
        sums[call.step] += getattr(call, field)
    return typical([sums[step] for step in steps])


def typical(of_steps: Sequence[float]) -> float:
    """Returns the median over the steps, or where it is 0 the mean: some things are done every few steps."""
    return statistics.median(of_steps) or statistics.fmean(of_steps)


def _rows(traces: Sequence[RankTrace], steps: range) -> list[CollectiveRow]:
    """Makes rows of the calls of each group's first rank, with the most bytes that a rank sends by them.

    Of a gather, a reduction to one rank or an uneven all-to-all not all ranks send as much.
    """
    sent_by: dict[tuple, dict[int, float]] = defaultdict(dict)
    for trace in traces:
        for call in trace.calls:
            if call.kind != "receive":
                sent_by[call.key][trace.rank] = call.sent
    kept: dict[tuple, list[Call]] = defaultdict(list)
    for trace in traces:
        for call in trace.calls:
            if call.step in steps and call.kind != "receive" and call.ranks and call.ranks[0] == trace.rank:
                kept[call.kind, call.ranks, call.site, call.dtype].append(call)
    rows = []
    for (kind, ranks, site, dtype), calls in kept.items():
        number = statistics.median(sum(call.step == step for call in calls) for step in steps)
        sums: dict[int, dict[int, float]] = defaultdict(lambda: dict.fromkeys(steps, 0.0))
        for call in calls:
            for rank, nbytes in sent_by[call.key].items():
                sums[rank][call.step] += nbytes
        medians = {rank: typical(list(by_step.values())) for rank, by_step in sums.items()}
        most = max(medians, key=lambda rank: (medians[rank], -rank))
        uneven = most if kind != "send" and min(medians.values()) < 0.9 * medians[most] else None
        shapes = tuple(dict.fromkeys(shape for call in calls for shape in call.shapes))
        row = CollectiveRow(kind, ranks, number or len(calls) / len(steps), medians[most], site, dtype, shapes)
        rows.append(replace(row, rank=uneven))
    return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.ranks))


def last_begun(traces: Sequence[RankTrace]) -> dict[tuple[str, tuple[int, ...], int], float]:
    """Returns when the last rank began each collective, and the sender each message.

    By the group, the group's ranks (of a message sender and receiver), and its number among theirs.
    """
    begun: dict[tuple[str, tuple[int, ...], int], float] = {}
    for trace in traces:
        for call in trace.calls:
            if call.kind != "receive":
                key = call.key
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
        communication, late = (covered_s(_spans(trace.rank, times)) for times in ([*flights, *stood], waits))
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
        last_s = begun.get(call.key, 0.0)
        if call.kind == "receive":
            waits += [(max(begin, call.begin_s), min(end, last_s)) for begin, end in stood]
        else:
            waits.append((call.begin_s, min(last_s, call.end_s or call.begin_s)))
    return waits


def _spans(rank: int, times: Iterable[tuple[float, float]]) -> list[Span]:
    return [Span(rank, "", "", begin, max(begin, end)) for begin, end in times]
