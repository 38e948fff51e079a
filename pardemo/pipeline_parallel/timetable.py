"""When each rank computes what if nothing but the order and the dependencies held it up; and the exchanges it needs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, product

from pardemo.meters.timeline import Span, covered_s
from pardemo.pipeline_parallel.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from pardemo.pipeline_parallel.schedules import Schedule, ScheduleError

#: Of spans: what is computed.
KINDS = ("forward", "backward", "weight gradients")


@dataclass(frozen=True)
class Chart:
    """A schedule's course.

    Attributes:
        spans: the computations, in units of the times given: name "stage.micro-batch", kind "forward" or "backward";
            where a backward is in two parts, its input's is the "backward" and the other one "weight gradients".
        in_flight: for each rank, the most pairs of stage and micro-batch whose forward was done and whose backward was
            not, the weights' part included: their activations are what it holds.
        times: begin and end of each computation; of a measured chart none.
    """

    spans: list[Span]
    in_flight: list[int]
    times: Mapping[Compute, tuple[float, float]] = field(default_factory=dict)

    @property
    def makespan(self) -> float:
        """From the first begin to the last end."""
        return max(s.end_s for s in self.spans) - min(s.begin_s for s in self.spans)

    @property
    def idle(self) -> list[float]:
        """For each rank, the time of the step in which it computes nothing, before its first computation and after its
        last one too."""
        ranks = sorted({s.rank for s in self.spans})
        return [self.makespan - covered_s([s for s in self.spans if s.rank == rank]) for rank in ranks]

    @property
    def bubble_of_total(self) -> float:
        """Idle time over all time, of all ranks together."""
        return sum(self.idle) / (len(self.in_flight) * self.makespan)

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over the time of the computation alone."""
        idle = sum(self.idle)
        return idle / (len(self.in_flight) * self.makespan - idle)


def chart(
    schedule: Schedule,
    forward: float = 1.0,
    backward: float = 2.0,
    latency: float = 0.0,
    weights: float | None = None,
    together: Collection[Forward] = (),
    pair: float | None = None,
) -> Chart:
    """The course of a schedule when a rank's forward and backward of a micro-batch take these times.

    With v chunks each takes a v-th of that. ``latency`` passes before another rank has what was computed. ``weights``
    is the part of ``backward`` that the weights' gradients take where they are computed apart: half of it when None.

    Args:
        together: forwards that run together with the whole backward behind them in their rank's order, as one
            computation: it begins when both have what they need, and both are done at its end.
        pair: what such a computation takes, also of v chunks; as long as the two of them when None.

    Raises:
        ScheduleError: it stands still; the line says which rank waits for what.
    """
    weights = backward / 2 if weights is None else weights
    if not 0 <= weights <= backward:
        raise ValueError(f"the weights' gradients are a part of the backward: from 0 to {backward:g}, not {weights:g}")
    takes = {Forward: forward, Backward: backward, BackwardInput: backward - weights, BackwardWeight: weights}
    pair = forward + backward if pair is None else pair
    ends: dict[Compute, tuple[float, float]] = {}
    left = [_at_once(schedule, rank, together) for rank in range(schedule.ranks)]
    at, clock = [0] * schedule.ranks, [0.0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(left):
            while at[rank] < len(order):
                steps = order[at[rank]]
                arrived = [when for step in steps if (when := _arrival(schedule, step, ends, latency)) is not None]
                if len(arrived) < len(steps):
                    break
                begin = max(clock[rank], *arrived)
                clock[rank] = begin + (takes[type(steps[0])] if len(steps) == 1 else pair) / schedule.chunks
                ends |= dict.fromkeys(steps, (begin, clock[rank]))
                at[rank], moved = at[rank] + 1, True
    stuck = [(rank, step) for rank, order in enumerate(left) for step in order[at[rank] : at[rank] + 1]]
    if stuck:
        waits = ", ".join(
            f"rank {rank} in {step} for {schedule.before(step)}"
            for rank, steps in stuck
            for step in steps
            if _arrival(schedule, step, ends, latency) is None
        )
        raise ScheduleError(f"deadlock: {waits}")
    spans = [
        Span(schedule.rank_of(c.stage), kind_of(c), f"{c.stage}.{c.micro_batch}", begin, end)
        for c, (begin, end) in ends.items()
    ]
    return Chart(spans, [round(most) for most in most_held(schedule)], ends)


def measured_chart(spans: list[Span]) -> Chart:
    """The same from a real run's timelines: all ranks' spans together, of which it takes the computations."""
    computed = sorted((s for s in spans if s.kind in KINDS), key=lambda s: s.begin_s)
    apart = {s.name for s in computed if s.kind == "weight gradients"}
    in_flight = []
    for rank in sorted({s.rank for s in computed}):
        kinds = [s.kind for s in computed if s.rank == rank and not (s.kind == "backward" and s.name in apart)]
        in_flight.append(round(_most([1 if kind == "forward" else -1 for kind in kinds])))
    return Chart(computed, in_flight)


def most_held(schedule: Schedule, for_weights: float = 1.0) -> list[float]:
    """For each rank, the most it holds of micro-batches' activations (of one stage each), by its order alone.

    ``for_weights`` is how much of one stays from the input's part of a backward to the weights' (M_W over M_B in the
    zero-bubble paper): with 1 it is :attr:`Chart.in_flight`. Whole backwards leave nothing.
    """

    def change(step: Compute) -> float:
        if isinstance(step, Forward):
            return 1
        if isinstance(step, Backward):
            return -1
        return -for_weights if isinstance(step, BackwardWeight) else for_weights - 1

    return [_most([change(step) for step in schedule.computes(rank)]) for rank in range(schedule.ranks)]


def _at_once(schedule: Schedule, rank: int, together: Collection[Forward]) -> list[tuple[Compute, ...]]:
    """A rank's order, in computations that begin and end together: one each, but for those pairs."""
    order = iter(schedule.computes(rank))
    computations: list[tuple[Compute, ...]] = []
    for step in order:
        if step not in together:
            computations.append((step,))
        elif isinstance(behind := next(order, None), Backward):
            computations.append((step, behind))
        else:
            raise ScheduleError(f"rank {rank} has no whole backward behind {step} that could run together with it")
    return computations


def _arrival(
    schedule: Schedule, step: Compute, ends: Mapping[Compute, tuple[float, float]], latency: float
) -> float | None:
    """When a computation has what it needs; None as long as that is not computed."""
    needed = schedule.before(step)
    if needed is None:
        return 0.0
    return ends[needed][1] + latency * schedule.travels(step) if needed in ends else None


def instructions(schedule: Schedule) -> list[list[Instruction]]:
    """Each rank's instructions: what it computes, with the exchanges in between.

    A result is sent as soon as it is there. Its receive stands, on the other rank, where that rank is at this time of
    the ideal chart: before what it computes meanwhile, so that data travels behind computation. All messages thus
    have one order in time, in which all ranks come to them: nobody can wait for ever, even where messages block both
    sides.
    """
    times = chart(schedule, schedule.chunks, 2 * schedule.chunks).times  # whole numbers: equal times are equal
    events: list[list[tuple]] = [[] for _ in range(schedule.ranks)]
    for number, (step, (_, end)) in enumerate(times.items()):
        events[schedule.rank_of(step.stage)].append((end, 0, number, step))
        needed = schedule.before(step)
        if needed is not None and schedule.travels(step):
            is_activation, sent = isinstance(needed, Forward), times[needed][1]
            send = (SendActivation if is_activation else SendGradient)(needed.stage, needed.micro_batch)
            receive = (ReceiveActivation if is_activation else ReceiveGradient)(step.stage, step.micro_batch)
            at = (sent, 1, needed.stage, needed.micro_batch, is_activation)  # one order among equals
            events[schedule.rank_of(needed.stage)].append((*at, send))
            events[schedule.rank_of(step.stage)].append((*at, receive))
    return [[event[-1] for event in sorted(of_rank, key=lambda event: event[:-1])] for of_rank in events]


def prove(schedule: Schedule) -> Chart:
    """Checks all that can be wrong with an order before any process runs it, and returns its chart.

    Proven: each forward and backward of every stage and micro-batch happens once, on the stage's rank, the backward
    after the forward, whole or in its two parts, the weights' after the input's; and no rank waits for ever. (The
    sends and receives of :func:`instructions` follow from the order.)

    Raises:
        ScheduleError: one line that says what is wrong, and where.
    """
    for rank in range(schedule.ranks):
        _check_order(schedule, rank)
    return chart(schedule)


def _check_order(schedule: Schedule, rank: int) -> None:
    stages, micro_batches = schedule.stages_of(rank), range(schedule.micro_batches)
    done: set[Instruction] = set()
    for step in schedule.computes(rank):
        if step.stage not in stages or step.micro_batch not in micro_batches:
            raise ScheduleError(
                f"rank {rank} is told {step}, but has stages {stages} and micro-batches 0 to {micro_batches[-1]}"
            )
        if step in done:
            raise ScheduleError(f"rank {rank} is told {step} twice")
        first = BackwardInput if isinstance(step, BackwardWeight) else Forward
        if not isinstance(step, Forward) and first(step.stage, step.micro_batch) not in done:
            raise ScheduleError(f"rank {rank} is told {step} before {first(step.stage, step.micro_batch)}")
        done.add(step)
    for stage, k in product(stages, micro_batches):
        backward, parts = Backward(stage, k), (BackwardInput(stage, k), BackwardWeight(stage, k))
        if backward in done and parts[0] in done:
            raise ScheduleError(f"rank {rank} is told {backward} and {parts[0]}: a backward is whole or in two parts")
        for step in (Forward(stage, k), *(parts if parts[0] in done else (backward,))):
            if step not in done:
                raise ScheduleError(f"rank {rank} is never told {step}")


def kind_of(compute: Compute) -> str:
    """Returns a computation's kind, as spans name it."""
    if isinstance(compute, Forward):
        return "forward"
    return "weight gradients" if isinstance(compute, BackwardWeight) else "backward"


def _most(changes: list[float]) -> float:
    return max(0, *accumulate(changes)) if changes else 0
