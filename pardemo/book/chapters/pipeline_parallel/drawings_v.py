"""ZB-V step by step: where its stages lie, and how the weights' gradients fill what would be idle."""

from pardemo.book.chapters.pipeline_parallel.drawings import Course, schedule_frame
from pardemo.draw.player import Player


def zero_bubble_v(ranks: int = 3) -> Player:
    """ZB-V with as many micro-batches as just fill it, 2p − 1, from the package's own schedule.

    A caption follows micro-batch 0 down the ranks and up again, and its gradient on the same way. Where a rank computes
    weights' gradients while what it needs next is not there yet, the caption says so. No caption says how long a rank
    is idle: a reader guesses it. It opens where micro-batch 0 has come down.

    Args:
        ranks: p, 2 or 3.

    Raises:
        ValueError: another number: its steps would not be readable.
    """
    from pardemo import pipeline_parallel as pp  # brings torch

    if not 2 <= ranks <= 3:
        raise ValueError(f"ZB-V on 2 or 3 ranks can be drawn, not on {ranks}")
    micro_batches = 2 * ranks - 1
    course = Course.of(pp.Schedule(pp.zb_v, ranks, micro_batches, 2))
    frames = [(schedule_frame(course, now), _caption(course, now)) for now in range(course.steps + 1)]
    return Player(frames, f"ZB-V with {micro_batches} micro-batches on {ranks} ranks", start=ranks, first=0)


def filled(course: Course) -> dict[tuple[int, int], str]:
    """Weights' gradients that a rank computes while it would have to wait: (stage, micro-batch) -> what is missing."""
    gaps: dict[tuple[int, int], str] = {}
    for rank in range(course.schedule.ranks):
        order = sorted(course.of_rank(rank).items(), key=lambda item: item[1])
        for place, ((stage, k, kind), (begin, _)) in enumerate(order):
            later = [computation for computation, _ in order[place + 1 :] if computation[2] != "weight gradients"]
            if kind == "weight gradients" and later:
                needed, what = _needed(course, *later[0])
                if needed is not None and course.times[needed][1] > begin:
                    gaps[stage, k] = what
    return gaps


def _needed(course: Course, stage: int, k: int, kind: str) -> tuple[tuple[int, int, str] | None, str]:
    """What has to be computed before a forward or an input's gradient, and what is handed on then."""
    if kind == "forward":
        return ((stage - 1, k, "forward") if stage else None), f"the activation of micro-batch {k}"
    if stage == course.schedule.stages - 1:
        return (stage, k, "forward"), f"the loss of micro-batch {k}"
    return (stage + 1, k, "backward"), f"the gradient of micro-batch {k}"


def _caption(course: Course, now: int) -> str:
    p, last = course.schedule.ranks, course.schedule.stages - 1
    if now == 0:
        return (
            f"Rank 0 has stages 0 and {last}, the first and the last one; rank {p - 1} has stages {p - 1} and {p}. "
            "F (forward), I (the input's gradient) and W (the weights' gradients) take one step each. "
            "W may come at any time after I."
        )
    running = {rank: course.running(rank, now) for rank in range(p)}
    if now == course.steps:
        return "Done. No rank was idle between its first and its last computation: grey is at the two ends alone."
    return " ".join([*_of_micro_batch_0(course, running, now), *_fills(course, running)])


def _of_micro_batch_0(course: Course, running: dict, now: int) -> list[str]:
    """Where micro-batch 0 is, and what that means for the others; later, what all ranks do."""
    p, last = course.schedule.ranks, course.schedule.stages - 1
    for rank, computation in running.items():
        if computation is None or computation[1] != 0 or computation[2] == "weight gradients":
            continue
        stage, _, kind = computation
        if kind == "forward" and stage < p:
            begins = f" Rank 0 already has micro-batch {running[0][1]}." if rank else ""
            return [f"Micro-batch 0 is in stage {stage}, on rank {rank}, on its way down.{begins}"]
        if kind == "forward":
            why = f" Rank {rank} handed it to itself: no message." if stage == p else ""
            why = f" The last stage is here, on rank {rank}, and so is the loss." if stage == last else why
            return [f"Micro-batch 0 is in stage {stage}, on rank {rank}, on its way up.{why}"]
        goes = "The loss is on rank 0, so it begins the backward pass at once: " if stage == last else ""
        home = " It is home." if stage == 0 else ""
        return [f"{goes}I of micro-batch 0 is in stage {stage}, on rank {rank}.{home}"]
    if now <= course.times[0, 0, "backward"][1]:
        return ["The gradient of micro-batch 0 waits a step: the rank that has it is busy with another micro-batch."]
    if now <= max(end for (_, _, kind), (_, end) in course.times.items() if kind == "forward"):
        return ["Each rank now takes F, I and W of one of its stages, then F, I and W of the other one."]
    return ["There are no forwards left. I comes first, since another rank waits for it, and W fills the rest."]


def _fills(course: Course, running: dict) -> list[str]:
    gaps, texts = filled(course), []
    for rank, computation in running.items():
        if computation and computation[2] == "weight gradients" and (missing := gaps.get(computation[:2])):
            texts.append(
                f"Rank {rank} would wait for {missing}: it computes W of micro-batch {computation[1]} instead."
            )
    return texts
