"""Searches all layouts that divide a job for the quickest that fit; says what the choice depends on."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from pardemo.planner.divisors import divisors, powers_of_two
from pardemo.planner.estimate import choose
from pardemo.planner.layouts.intervals import Interval, beyond_measured, of_seconds
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import CONTEXTS, RECOMPUTE, SHARDING, Layout, exchanges_heads
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import Memory, predict_memory
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.step import PredictedStep, idle_stages, predict_step

MOST_ACROSS = 2  # hosts that tensor parallelism may span: beyond, nothing published was quick
MOST_SAMPLES = 32  # of a micro-batch
MOST_CHUNKS = 8
#: Of the predicted time of a layout whose tensor parallelism leaves the host, what a choice reckons with: the median of
#: nanotron's runs of that kind took 1.26 times as long as predicted, of the others 1.02 times.
ACROSS = 1.25
#: The same of what else has gone wrong with a program, by name. Of nanotron's pipelines over hosts 67 runs had replicas
#: without ZeRO-1, and the median took 2.4 times as long; of the 398 others the median took as long as predicted, but
#: each third waited for messages. Replicas over hosts without ZeRO-1 took 1.05 times as long.
RECORDS = {"nanotron": {"TP": 1.35, "PP without ZeRO": 2.4, "PP": 1.1, "without ZeRO": 1.05}}


@dataclass(frozen=True, eq=False)
class PlannedLayout:
    """A job in one layout, with its predicted time and memory."""

    job: Job
    layout: Layout

    @cached_property
    def step(self) -> PredictedStep:
        return predict_step(self.job, self.layout)

    @cached_property
    def memory(self) -> Memory:
        return predict_memory(self.job, self.layout)

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @cached_property
    def peak_bytes(self) -> float:
        return self.memory.peak_bytes

    @property
    def interval(self) -> Interval:
        """Between which seconds a step lies in four of five cases."""
        return of_seconds(self.job, self.layout, self.seconds)

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU that a plan may fill."""
        return self.job.machine.usable_bytes

    @property
    def fits(self) -> bool:
        """Whether a GPU holds it, however little stays free."""
        return self.peak_bytes <= self.job.machine.most_bytes

    @property
    def has_room(self) -> bool:
        """Whether it leaves the share of a GPU free that a plan leaves where it can choose."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def headroom(self) -> float:
        """Share of the GPU's memory that stays free."""
        return 1 - self.peak_bytes / self.job.machine.gpu.memory_bytes


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        tried: layouts whose memory was looked at. fitting: how many fit, with what a plan leaves free.
        best: layouts from the quickest on, one for each way to cut the model; those with tensor parallelism beyond a
            host only where they are quicker by what published runs of that kind took longer than predicted, and those
            beyond the hosts of any published run only where they are quicker at the upper end of their interval.
        front: layouts that no other beats in both time and headroom, from the quickest to the one with most headroom.
        least: of all that were tried, the one with the least memory; what to look at where nothing fits.
    """

    job: Job
    batch: int
    tried: int
    fitting: int
    best: tuple[PlannedLayout, ...]
    front: tuple[PlannedLayout, ...]
    least: PlannedLayout


def layouts(shape: Shape, machine: Machine, batch: int, sequence: int) -> Iterator[Layout]:
    """Yields every layout of ``batch`` samples a step that divides the model, the batch and the sequence."""
    gpus, most_tp = machine.gpus, machine.host_gpus * MOST_ACROSS
    for tp, pp in itertools.product(divisors(gpus, min(most_tp, shape.heads)), divisors(gpus, shape.layers)):
        if gpus % (tp * pp) or shape.heads % tp or sequence % tp:
            continue
        for cp in _contexts(gpus // tp // pp, sequence):
            dp = gpus // tp // pp // cp
            if batch % dp:
                continue
            base = Layout(tp=tp, pp=pp, cp=cp, dp=dp, sequence_parallel=tp > 1)
            ways = CONTEXTS if cp > 1 and exchanges_heads(base, shape) else CONTEXTS[:1]
            for ep, way in itertools.product(_experts(shape, dp * cp), ways):
                yield from _filled(base.but(ep=ep, context=way), shape, batch // dp, machine)


def _filled(base: Layout, shape: Shape, share: int, machine: Machine) -> Iterator[Layout]:
    """Yields a cut of the model with each sharding, recomputation, micro-batch and number of chunks."""
    ways = shardings(base.replicas, machine.host_gpus // base.tp)[base.replicas > 1 :]  # else the states are shared
    for micro in divisors(share, MOST_SAMPLES):
        m = share // micro
        for recompute, (sharding, group) in itertools.product(RECOMPUTE, ways):
            layout = base.but(
                micro_batch=micro, accumulation=m, sharding=sharding, shard_group=group, recompute=recompute
            )
            for chunks in chunks_of(shape.layers, base.pp, m, min(MOST_CHUNKS, shape.layers // base.pp)):
                yield layout.but(chunks=chunks) if chunks > 1 else layout


def shardings(replicas: int, inside: int) -> list[tuple[str, int]]:
    """Lists what ``replicas`` may share, and in groups of how many (0: of all), with ``inside`` of them on a host."""
    hsdp = [("zero3", inside)] if 1 < inside < replicas and replicas % inside == 0 else []
    return [*((sharding, 0) for sharding in SHARDING[: 1 if replicas == 1 else None]), *hsdp]


def chunks_of(layers: int, pp: int, micro_batches: int, most: int) -> list[int]:
    """Lists a stage's possible numbers of chunks: 1, and those that divide the fullest, since others would wait."""
    if pp == 1 or micro_batches % pp:
        return [1]
    return [1, *(chunks for chunks in range(2, most + 1) if -(-layers // pp) % chunks == 0)]


def search(job: Job, batch: int, most: int = 5, able: Callable[[Layout], bool] | None = None) -> SearchResult:
    """Returns the best layouts of a job on its machine.

    Memory comes first, since it is quick to compute; then the time of the layouts that fit. ``able`` says what the
    program can run of those that its constants allow (:func:`pardemo.planner.layouts.launch.runnable_by_program`).

    Raises:
        ValueError: no layout divides the job.
    """
    if batch < 1:
        raise ValueError(f"a step must have at least 1 sample, not {batch!r}")
    tried, fitting, least = 0, [], None
    selects = worth_selecting(job)
    for layout in layouts(job.shape, job.machine, batch, job.sequence):
        if layout.recompute == "selective" and not selects:
            continue
        if not job.program.can_run(layout) or idle_stages(job, layout) or (able is not None and not able(layout)):
            continue
        tried += 1
        candidate = PlannedLayout(job, layout)
        if least is None or candidate.peak_bytes < least.peak_bytes:
            least = candidate
        if candidate.has_room:
            fitting.append(candidate)
    if least is None:
        raise ValueError(
            f"no layout that {job.program.name} runs divides {job.shape.layers} layers, {job.shape.heads} heads and "
            f"{batch} samples over {job.machine.gpus} GPUs; try a batch that is a multiple of {job.machine.gpus}"
        )
    fitting.sort(key=lambda candidate: candidate.seconds)
    return SearchResult(job, batch, tried, len(fitting), _best(fitting, most), _front(fitting), least)


def worth_selecting(job: Job) -> bool:
    """Tells whether selective recomputation saves memory: beside FlashAttention, scores alone save none."""
    return not job.fused or job.program.selective_kept_share < 1


def _best(timed: list[PlannedLayout], most: int) -> tuple[PlannedLayout, ...]:
    """Returns the quickest of each way to cut the model; within 1 % the simplest, then that with least memory."""
    ways: dict[tuple, list[PlannedLayout]] = defaultdict(list)
    for candidate in timed:
        layout = candidate.layout
        ways[layout.tp, layout.pp, layout.sharding == "zero3", layout.shard_group].append(candidate)
    chosen = [choose(candidates, lambda planned: planned.seconds, _preference) for candidates in ways.values()]
    return tuple(sorted(chosen, key=_reckoned)[:most])


def _reckoned(candidate: PlannedLayout) -> float:
    """Returns the seconds by which layouts are compared.

    A layout whose stages go over more hosts than any measured run's counts with the upper end of its interval: within
    that, one that was measured to scale comes first. (nanotron's TP × DP on 64 hosts took 2 to 15 times as long.)
    """
    seconds = candidate.seconds
    if beyond_measured(candidate.job, candidate.layout):
        seconds = max(seconds, candidate.interval.high)
    return expected(candidate.job, candidate.layout, seconds)


def expected(job: Job, layout: Layout, seconds: float) -> float:
    """Seconds to choose by: the predicted ones, times what layouts of a kind that has gone wrong have taken more."""
    record = RECORDS.get(job.program.name, {})
    across = job.machine.crossings(layout.pp, layout.tp * layout.cp * layout.dp) > 0
    replicas = layout.sharding == "none" and layout.replicas > 1 and layout.gpus > job.machine.host_gpus
    if not job.machine.inside(layout.tp):
        seconds *= record.get("TP", ACROSS)
    if across:
        return seconds * record.get("PP without ZeRO" if replicas else "PP", 1.0)
    return seconds * (record.get("without ZeRO", 1.0) if replicas else 1.0)


def _preference(candidate: PlannedLayout) -> tuple[int, int, float]:
    """Orders layouts that are as quick: whole sequences first, then whole experts, then little memory."""
    return candidate.layout.cp, candidate.layout.ep, candidate.peak_bytes


def _front(timed: list[PlannedLayout]) -> tuple[PlannedLayout, ...]:
    front: list[PlannedLayout] = []
    for candidate in timed:
        if not front or candidate.peak_bytes < 0.98 * front[-1].peak_bytes:
            front.append(candidate)
    return tuple(front)


def changes(job: Job) -> dict[str, Job]:
    """Lists assumptions that a choice may depend on: a name, and the job with this one changed."""
    machine, gpu = job.machine, job.machine.gpu
    slow = replace(gpu, link_bytes_per_s=gpu.link_bytes_per_s / 2)
    return {
        "links between nodes half as fast": replace(job, machine=replace(machine, between=machine.between / 2)),
        "links inside a node half as fast": replace(job, machine=replace(machine, gpu=slow)),
        "sequences twice as long": replace(job, sequence=2 * job.sequence),
    }


def sensitivity(
    answer: SearchResult, able: Callable[[Layout], bool] | None = None
) -> dict[str, tuple[PlannedLayout, PlannedLayout]]:
    """Returns for each changed assumption the best layout then, and the present best one under it."""
    changed = {name: if_changed(answer, job, able) for name, job in changes(answer.job).items()} if answer.best else {}
    return {name: pair for name, pair in changed.items() if pair is not None}


def if_changed(
    answer: SearchResult, job: Job, able: Callable[[Layout], bool] | None = None
) -> tuple[PlannedLayout, PlannedLayout] | None:
    """Returns a changed job's best layout, and the present best one under it; None where nothing fits."""
    result = search(job, answer.batch, 1, able)
    return (result.best[0], PlannedLayout(job, answer.best[0].layout)) if result.best else None


def _contexts(ranks: int, sequence: int) -> list[int]:
    """Yields context-parallel ranks: powers of two, each with at least 2,048 tokens."""
    return [n for n in powers_of_two(1024) if ranks % n == 0 and (n == 1 or sequence >= 2048 * n)]


def _experts(shape: Shape, ranks: int) -> list[int]:
    if shape.experts is None:
        return [1]
    return [n for n in divisors(shape.experts.count, ranks) if ranks % n == 0]
