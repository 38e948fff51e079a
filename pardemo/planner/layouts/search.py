"""All layouts that divide, the quickest that fit, and how much the choice depends on what was assumed."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pardemo.planner.layouts.intervals import Interval, of_seconds
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import CONTEXTS, Layout, exchanges_heads
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import Memory, memory
from pardemo.planner.layouts.published.against import NEAR, expected, room
from pardemo.planner.layouts.published.runs import PublishedRun
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.step import PredictedStep, idle_stages, step

MOST_ACROSS = 2  # hosts that tensor parallelism may span: beyond, nothing published was quick
MOST_SAMPLES = 32  # of a micro-batch
MOST_CHUNKS = 8


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with its predicted time and memory.

    ``room`` is the bytes of a GPU that a plan may fill, ``capacity`` all that it has.
    """

    layout: Layout
    step: PredictedStep
    memory: Memory
    room: float
    capacity: float

    @property
    def seconds(self) -> float:
        return self.step.seconds

    def interval(self, job: Job) -> Interval:
        """Between which seconds a step lies in four of five cases."""
        return of_seconds(job, self.layout, self.seconds)

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.room

    @property
    def headroom(self) -> float:
        """Share of the GPU's memory that stays free."""
        return 1 - self.memory.peak_bytes / self.capacity


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Args:
        tried: layouts whose memory was looked at. fitting: how many fit.
        best: layouts from the quickest on, one for each way to cut the model; those with tensor parallelism beyond a
            host only where they are quicker by what published runs of that kind took longer than predicted.
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
    """Every layout of ``batch`` samples a step that divides the model, the batch and the sequence."""
    gpus, most_tp = machine.gpus, machine.host_gpus * MOST_ACROSS
    for tp, pp in itertools.product(_divisors(gpus, min(most_tp, shape.heads)), _divisors(gpus, shape.layers)):
        if gpus % (tp * pp) or shape.heads % tp or sequence % tp:
            continue
        for cp in _contexts(gpus // tp // pp, sequence):
            dp = gpus // tp // pp // cp
            if batch % dp:
                continue
            share = batch // dp
            base = Layout(tp=tp, pp=pp, cp=cp, dp=dp, sequence_parallel=tp > 1)
            ways = CONTEXTS if cp > 1 and exchanges_heads(base, shape) else CONTEXTS[:1]
            for ep, way in itertools.product(_experts(shape, dp * cp), ways):
                yield from _filled(base.but(ep=ep, context=way), shape, share, machine)


def _filled(base: Layout, shape: Shape, share: int, machine: Machine) -> Iterator[Layout]:
    """Sharding, recomputation, micro-batches and chunks of a way to cut the model."""
    shardings = [("none", 0)] if base.replicas == 1 else [("zero1", 0)]
    if base.replicas > 1:
        inside = machine.host_gpus // base.tp
        shardings += [("zero2", 0), ("zero3", 0)]
        if 1 < inside < base.replicas and base.replicas % inside == 0:
            shardings.append(("zero3", inside))
    for micro in _divisors(share, MOST_SAMPLES):
        m = share // micro
        for recompute, (sharding, group) in itertools.product(("none", "selective", "full"), shardings):
            layout = base.but(
                micro_batch=micro, accumulation=m, sharding=sharding, shard_group=group, recompute=recompute
            )
            yield layout
            if base.pp > 1 and m % base.pp == 0:
                fullest = -(-shape.layers // base.pp)  # chunks of unequal size wait for one another
                for chunks in range(2, min(MOST_CHUNKS, shape.layers // base.pp) + 1):
                    if fullest % chunks == 0:
                        yield layout.but(chunks=chunks)


def search(job: Job, batch: int, most: int = 5, able: Callable[[Layout], bool] | None = None) -> SearchResult:
    """The best layouts of a job on its machine.

    Memory comes first, since it is quick to compute; then the time of the layouts that fit. ``able`` says what the
    program can run of those that its constants allow (:func:`pardemo.planner.layouts.launch.able`).

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
        if not job.stack.runs(layout) or idle_stages(job, layout) or (able is not None and not able(layout)):
            continue
        tried += 1
        footprint = memory(job, layout)
        if least is None or footprint.peak_bytes < least[1].peak_bytes:
            least = layout, footprint
        if footprint.peak_bytes <= room(job):
            fitting.append((layout, footprint))
    if least is None:
        raise ValueError(
            f"no layout that {job.stack.name} runs divides {job.shape.layers} layers, {job.shape.heads} heads and "
            f"{batch} samples over {job.machine.gpus} GPUs; try a batch that is a multiple of {job.machine.gpus}"
        )
    timed = sorted((_timed(job, *pair) for pair in fitting), key=lambda candidate: candidate.seconds)
    return SearchResult(job, batch, tried, len(fitting), _best(job, timed, most), _front(timed), _timed(job, *least))


def worth_selecting(job: Job) -> bool:
    """Whether selective recomputation saves memory: where it recomputes scores alone, FlashAttention has saved it."""
    return not job.fused or job.stack.selective_keeps < 1


def _timed(job: Job, layout: Layout, footprint: Memory) -> PlannedLayout:
    return PlannedLayout(layout, step(job, layout), footprint, room(job), job.machine.gpu.memory_bytes)


def _best(job: Job, timed: list[PlannedLayout], most: int) -> tuple[PlannedLayout, ...]:
    """The quickest of each way to cut the model; of those within 1 % the simplest, then the one with least memory."""
    quickest: dict[tuple, PlannedLayout] = {}
    chosen: dict[tuple, PlannedLayout] = {}
    for candidate in timed:
        layout = candidate.layout
        key = layout.tp, layout.pp, layout.sharding == "zero3", layout.shard_group
        near = candidate.seconds <= NEAR * quickest.setdefault(key, candidate).seconds
        if near and _modesty(candidate) < _modesty(chosen.setdefault(key, candidate)):
            chosen[key] = candidate
    return tuple(
        sorted(chosen.values(), key=lambda candidate: expected(job, candidate.layout, candidate.seconds))[:most]
    )


def _modesty(candidate: PlannedLayout) -> tuple[int, int, float]:
    """What is preferred of layouts that are as quick: a sequence and experts that are whole, little memory."""
    return candidate.layout.cp, candidate.layout.ep, candidate.memory.peak_bytes


def _front(timed: list[PlannedLayout]) -> tuple[PlannedLayout, ...]:
    front: list[PlannedLayout] = []
    for candidate in timed:
        if not front or candidate.memory.peak_bytes < 0.98 * front[-1].memory.peak_bytes:
            front.append(candidate)
    return tuple(front)


def changes(job: Job) -> dict[str, Job]:
    """What a choice may depend on: a name, and the job with this changed."""
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
    """For each changed assumption: the layout that is then the best, and the present best one as it then is."""
    changed = {name: if_changed(answer, job, able) for name, job in changes(answer.job).items()} if answer.best else {}
    return {name: pair for name, pair in changed.items() if pair is not None}


def if_changed(
    answer: SearchResult, job: Job, able: Callable[[Layout], bool] | None = None
) -> tuple[PlannedLayout, PlannedLayout] | None:
    """Of a changed job: the layout that is then the best, and the present best one; None where nothing fits."""
    result = search(job, answer.batch, 1, able)
    now = answer.best[0].layout
    return (result.best[0], _timed(job, now, memory(job, now))) if result.best else None


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _contexts(ranks: int, sequence: int) -> list[int]:
    """Context-parallel ranks: powers of two, each with at least 2,048 tokens."""
    return [n for n in (2**k for k in range(11)) if ranks % n == 0 and (n == 1 or sequence >= 2048 * n)]


def _experts(shape: Shape, ranks: int) -> list[int]:
    if shape.experts is None:
        return [1]
    return [n for n in _divisors(shape.experts.count, ranks) if ranks % n == 0]


def correct_pace(job: Job, runs: Sequence[PublishedRun]) -> tuple[Job, str]:
    """The job at the pace of ``runs``: the median of what they took over what is predicted of them; and a line on it.

    Raises:
        ValueError: none of them has a time on the job's GPU and with its program.
    """
    wanted = _where(job)
    timed = [run for run in runs if run.seconds and not run.wrong and _where(run.job) == wanted]
    if not timed:
        others = sorted({_where(run.job) for run in runs if run.seconds})
        told = ", ".join(others) or "none that has a time"
        raise ValueError(f"--measured has no run with a time on {wanted}; it has {told}")
    ratios = sorted(run.seconds / step(run.job, run.layout).seconds for run in timed if run.seconds)
    pace = statistics.median(ratios)
    line = f"{len(ratios)} measured run{'s' * (len(ratios) > 1)} took {pace:.2f} times as long as predicted"
    if len(ratios) > 1:
        rest = max(abs(ratio / pace - 1) for ratio in ratios)
        line += f" ({ratios[0]:.2f} to {ratios[-1]:.2f}), so all times are multiplied by it; they themselves are then "
        line += f"up to {100 * rest:.0f} % off"
    else:
        line += ", so all times are multiplied by it; one run does not tell how far the rest is off"
    return replace(job, pace=pace, measured=True), line


def _where(job: Job) -> str:
    return f"{job.machine.gpu.name} with {job.stack.name}"
