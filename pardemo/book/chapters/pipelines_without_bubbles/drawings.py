"""Zero bubble: the two halves of a backward pass, a V, ZB-V step by step, and a pair that runs together."""

from pardemo.book.chapters.pipeline_parallel.drawings import Course, pipeline_schedule, schedule_frame, stages_on_ranks
from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT
from pardemo.draw.parts import check_range, legend
from pardemo.draw.player import Player

__all__ = ["a_pair", "a_v", "pipeline_schedule", "two_gradients", "zero_bubble_v"]


@drawing(300)
def two_gradients(canvas: Canvas) -> None:
    """The backward pass of a stage in two halves. From dy, which the rank behind sends, I computes dx, which the rank
    before waits for. W computes the gradients of the weights from dy and x; nobody but the optimizer waits for them."""
    talk, gradient = DONE["communication"], KEPT["gradients"]
    for x, wide, name in ((4, 132, "rank before"), (158, 324, "this rank"), (504, 132, "rank behind")):
        canvas.text(x + wide / 2, 16, name, bold=True)
        canvas.box(x, 32, wide, 196, thick=1)
    canvas.box(24, 62, 92, 44, DONE["backward"], "its I")
    canvas.box(524, 62, 92, 44, DONE["backward"], "its I")
    canvas.box(262, 62, 116, 44, DONE["backward"], "I")
    canvas.box(262, 156, 116, 44, DONE["weight gradients"], "W")
    canvas.arrow([(521, 84), (382, 84)], talk)
    canvas.text(440, 66, "dy", fill=talk, bold=True)
    canvas.arrow([(258, 84), (120, 84)], talk)
    canvas.text(196, 66, "dx", fill=talk, bold=True)
    canvas.arrow([(430, 84), (430, 178), (382, 178)], thick=2.5)
    canvas.box(178, 160, 36, 36, KEPT["activations"], "x")
    canvas.arrow([(218, 178), (258, 178)], thick=2.5)
    canvas.arrow([(320, 204), (320, 252)], gradient)
    canvas.box(222, 256, 196, 38, gradient, "dweight")
    canvas.text(432, 275, "for the optimizer", "start")


@drawing()
def a_v(canvas: Canvas, ranks: int = 4) -> str:
    """Two stages on each rank, placed in two ways: round and round (interleaved 1F1B), and as a V (ZB-V).

    Args:
        ranks: p, from 2 to 5; others raise a ValueError.
    """
    check_range(ranks, 2, 5)
    canvas.height = 54 + 62 * ranks
    down, last = list(range(ranks)), 2 * ranks - 1
    around = [[f"stage {rank}", f"stage {ranks + rank}"] for rank in down]
    stages_on_ranks(canvas, 84, "round and round", around, down * 2)
    v_shaped = [[f"stage {rank}", f"stage {last - rank}"] for rank in down]
    stages_on_ranks(canvas, 400, "down and up: a V", v_shaped, down + down[::-1])
    return (
        f"Two stages on each of {ranks} ranks. Round and round, rank i has stages i and {ranks} + i, and the last rank "
        f"hands on to the first. As a V, rank i has stages i and {last} − i: the last rank hands on to "
        "itself, and the first rank has the last stage."
    )


@drawing(318)
def a_pair(canvas: Canvas) -> None:
    """A forward and a backward, each of two parts with a message behind each part. One after the other the GPU is idle
    during all four messages. Together it computes a part of one while the message of the other travels, and is done
    sooner."""
    left, scale = 100, 1.38
    compute, message = {"forward": 44, "backward": 66}, 40  # how long one part of each takes
    cases = (
        (
            14,
            "one after the other: the GPU waits for each message",
            ("forward", "forward", "backward", "backward"),
            message,
        ),
        (154, "together: while one sends, the other computes", ("forward", "backward") * 2, 0),
    )
    for y, title, kinds, wait in cases:
        canvas.text(4, y, title, "start", bold=True)
        canvas.text(4, y + 42, "GPU", "start")
        canvas.text(4, y + 92, "network", "start")
        x = float(left)
        for kind in kinds:
            wide, letter = compute[kind] * scale, kind[0].upper()
            canvas.box(x, y + 22, wide, 40, DONE[kind], letter)
            canvas.box(x + wide, y + 74, message * scale, 36, DONE["communication"], f"{letter}'s")
            if wait:
                canvas.box(x + wide, y + 22, wait * scale, 40, DONE["idle"], border=DONE["idle"])
            x += wide + wait * scale
    legend(canvas, 20, 296, {name: DONE[name] for name in ("forward", "backward", "communication", "idle")})


def zero_bubble_v(ranks: int = 3) -> Player:
    """ZB-V with as many micro-batches as just fill it, 2p − 1, from the package's own schedule.

    A caption follows micro-batch 0 down the ranks and up again, and its gradient on the same way. Where a rank computes
    weights' gradients while what it needs next is not there yet, the caption says so. No caption says how long a rank
    is idle: a reader guesses it. It opens where micro-batch 0 has come down.

    Args:
        ranks: p, 2 or 3; others raise a ValueError.
    """
    from pardemo import pipeline_parallel as pp  # brings torch

    check_range(ranks, 2, 3)
    micro_batches = 2 * ranks - 1
    course = Course.of(pp.Schedule(pp.zb_v, ranks, micro_batches, 2))
    frames = [(schedule_frame(course, now), _v_caption(course, now)) for now in range(course.steps + 1)]
    return Player(frames, f"ZB-V with {micro_batches} micro-batches on {ranks} ranks", start=ranks, first=0)


def filled(course: Course) -> dict[tuple[int, int], str]:
    """Weights' gradients that a rank computes while it would have to wait: (stage, micro-batch) -> what is missing."""
    gaps: dict[tuple[int, int], str] = {}
    last = course.schedule.stages - 1
    for rank in range(course.schedule.ranks):
        order = sorted(course.of_rank(rank).items(), key=lambda item: item[1])
        for index, ((stage, k, kind), (begin, _)) in enumerate(order):
            later = [computation for computation, _ in order[index + 1 :] if computation[2] != "weight gradients"]
            if kind != "weight gradients" or not later:
                continue
            following, batch, direction = later[0]
            if direction == "forward":
                needed, arrives = (following - 1, batch, "forward"), "activation"
            elif following == last:
                needed, arrives = (following, batch, "forward"), "loss"
            else:
                needed, arrives = (following + 1, batch, "backward"), "gradient"
            if needed[0] >= 0 and course.times[needed][1] > begin:  # the first stage's input is always there
                gaps[stage, k] = f"the {arrives} of micro-batch {batch}"
    return gaps


def _v_caption(course: Course, now: int) -> str:
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
    gaps, fills = filled(course), []
    for rank, computation in running.items():
        if computation and computation[2] == "weight gradients" and (missing := gaps.get(computation[:2])):
            fills.append(
                f"Rank {rank} would wait for {missing}: it computes W of micro-batch {computation[1]} instead."
            )
    return " ".join([_of_micro_batch_0(course, running, now), *fills])


def _of_micro_batch_0(course: Course, running: dict, now: int) -> str:
    """Where micro-batch 0 is, and what that means for the others; later, what all ranks do."""
    p, last = course.schedule.ranks, course.schedule.stages - 1
    for rank, computation in running.items():
        if computation is None or computation[1] != 0 or computation[2] == "weight gradients":
            continue
        stage, _, kind = computation
        if kind == "forward" and stage < p:
            begins = f" Rank 0 already has micro-batch {running[0][1]}." if rank else ""
            return f"Micro-batch 0 is in stage {stage}, on rank {rank}, on its way down.{begins}"
        if kind == "forward":
            why = f" Rank {rank} handed it to itself: no message." if stage == p else ""
            why = f" The last stage is here, on rank {rank}, and so is the loss." if stage == last else why
            return f"Micro-batch 0 is in stage {stage}, on rank {rank}, on its way up.{why}"
        goes = "The loss is on rank 0, so it begins the backward pass at once: " if stage == last else ""
        home = " It is home." if stage == 0 else ""
        return f"{goes}I of micro-batch 0 is in stage {stage}, on rank {rank}.{home}"
    if now <= course.times[0, 0, "backward"][1]:
        return "The gradient of micro-batch 0 waits a step: the rank that has it is busy with another micro-batch."
    if now <= max(end for (_, _, kind), (_, end) in course.times.items() if kind == "forward"):
        return "Each rank now takes F, I and W of one of its stages, then F, I and W of the other one."
    return "There are no forwards left. I comes first, since another rank waits for it, and W fills the rest."
