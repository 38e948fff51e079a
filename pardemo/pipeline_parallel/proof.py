"""What can be known of a schedule before any process runs it: nothing is missing, nothing stands still."""

from collections.abc import Sequence

from pardemo.pipeline_parallel.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Receive,
    Send,
    receive_for,
    receiver_of,
    send_of,
    sender_of,
)
from pardemo.pipeline_parallel.schedules import Schedule, ScheduleError
from pardemo.pipeline_parallel.timetable import Chart, chart, instructions

Orders = Sequence[Sequence[Instruction]]


def prove(schedule: Schedule, orders: Orders | None = None) -> Chart:
    """Checks all that can go wrong with each rank's instructions, and returns the chart of the schedule.

    Proven: each forward and backward of every stage and micro-batch happens once, on the stage's rank, the backward
    after the forward, whole or in its two parts, the weights' after the input's; each has its input received before it,
    and its result sent after it; every receive has one send and every send one receive; and nobody waits for ever, even
    when every message blocks both sides until it is done.

    Args:
        orders: the instructions of each rank, by default those that follow from the schedule.

    Raises:
        ScheduleError: one line that says what is wrong, and where.
    """
    if orders is None:
        for rank in range(schedule.ranks):
            _check_computes(schedule, rank, schedule.computes(rank))
        orders = instructions(schedule)
    for rank, order in enumerate(orders):
        _check_computes(schedule, rank, [instruction for instruction in order if isinstance(instruction, Compute)])
        _check_exchanges(schedule, rank, order)
    _check_partners(orders)
    _check_progress(schedule, orders)
    return chart(schedule)


def _check_computes(schedule: Schedule, rank: int, order: Sequence[Compute]) -> None:
    done: set[Instruction] = set()
    for step in order:
        if not 0 <= step.stage < schedule.stages or schedule.rank_of(step.stage) != rank:
            raise ScheduleError(f"rank {rank} is told {step}, but has no stage {step.stage}")
        if not 0 <= step.micro_batch < schedule.micro_batches:
            raise ScheduleError(f"rank {rank} is told {step}, but there are {schedule.micro_batches} micro-batches")
        if step in done:
            raise ScheduleError(f"rank {rank} is told {step} twice")
        of = step.stage, step.micro_batch
        if isinstance(step, Backward | BackwardInput) and Forward(*of) not in done:
            raise ScheduleError(f"rank {rank} is told {step} before its forward")
        if isinstance(step, BackwardWeight) and BackwardInput(*of) not in done:
            raise ScheduleError(f"rank {rank} is told {step} before {BackwardInput(*of)}")
        done.add(step)
    for stage in schedule.stages_of(rank):
        for k in range(schedule.micro_batches):
            whole, parts = Backward(stage, k), (BackwardInput(stage, k), BackwardWeight(stage, k))
            if whole in done and parts[0] in done:
                raise ScheduleError(f"rank {rank} is told {whole} and {parts[0]}: a backward is whole or in two parts")
            for step in (Forward(stage, k), *(parts if parts[0] in done else (whole,))):
                if step not in done:
                    raise ScheduleError(f"rank {rank} is never told {step}")


def _check_exchanges(schedule: Schedule, rank: int, order: Sequence[Instruction]) -> None:
    place = {instruction: number for number, instruction in enumerate(order)}
    if len(place) < len(order):
        twice = next(instruction for number, instruction in enumerate(order) if place[instruction] != number)
        raise ScheduleError(f"rank {rank} is told {twice} twice")
    wanted: set[Instruction] = set()
    for step in (instruction for instruction in order if isinstance(instruction, Compute)):
        if schedule.travels(step):
            receive = receive_for(step)
            wanted.add(receive)
            if place.get(receive, len(order)) > place[step]:
                raise ScheduleError(f"rank {rank} is told {step} without {receive} before it")
        following = _after(schedule, step)
        if following is not None and schedule.travels(following):
            send = send_of(step)
            wanted.add(send)
            if place.get(send, -1) < place[step]:
                raise ScheduleError(f"rank {rank} is told {step} without {send} after it")
    for instruction in order:
        if not isinstance(instruction, Compute) and instruction not in wanted:
            raise ScheduleError(f"rank {rank} is told {instruction}, which nobody needs")


def _after(schedule: Schedule, step: Compute) -> Compute | None:
    """What needs this computation's result from another stage."""
    if isinstance(step, Forward):
        return Forward(step.stage + 1, step.micro_batch) if step.stage < schedule.stages - 1 else None
    if isinstance(step, BackwardWeight):
        return None
    return schedule.backward(step.stage - 1, step.micro_batch) if step.stage else None


def _check_partners(orders: Orders) -> None:
    rank_of = {instruction: rank for rank, order in enumerate(orders) for instruction in order}
    for instruction, rank in rank_of.items():
        if isinstance(instruction, Receive) and sender_of(instruction) not in rank_of:
            raise ScheduleError(
                f"rank {rank} waits in {instruction} for {sender_of(instruction)}, which no rank is told"
            )
        if isinstance(instruction, Send) and receiver_of(instruction) not in rank_of:
            raise ScheduleError(f"rank {rank} is told {instruction}, but no rank {receiver_of(instruction)}")


def _check_progress(schedule: Schedule, orders: Orders) -> None:
    """Plays it with messages that block: a rank passes one only together with the other rank."""
    at = [0] * len(orders)

    def current(rank: int) -> Instruction | None:
        return orders[rank][at[rank]] if at[rank] < len(orders[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(orders)):
            while isinstance(step := current(rank), Compute):
                at[rank], moved = at[rank] + 1, True
            if isinstance(step, Send):
                receive = receiver_of(step)
                peer = schedule.rank_of(receive.stage)
                if current(peer) == receive:
                    at[rank], at[peer], moved = at[rank] + 1, at[peer] + 1, True
    stuck = [f"rank {rank} in {current(rank)}" for rank in range(len(orders)) if current(rank) is not None]
    if stuck:
        raise ScheduleError(f"deadlock: {', '.join(stuck)}")
