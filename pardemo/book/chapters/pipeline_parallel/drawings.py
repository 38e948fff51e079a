"""Pipelines: stages and what they send, schedules step by step, a pair, tied weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, ink_on, rank_colour
from pardemo.draw.parts import legend, unbroken
from pardemo.draw.player import Player
from pardemo.formulas import pipeline as formulas

if TYPE_CHECKING:
    from pardemo.pipeline_parallel import Schedule
KINDS = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb_h1": "ZB-H1",
    "zb_v": "ZB-V",
}
_TOP, _RIGHT, _GAP = 62, 112, 14
_NARROW = 12  # a step is at least as wide as a digit
#: (stage, micro-batch, kind), of the kinds in :attr:`Course.kinds`.
Computation = tuple[int, int, str]
Times = Mapping[Computation, tuple[int, int]]  # begin and end in time steps


def pipeline_schedule(
    kind: str, stages: int, micro_batches: int, chunks: int = 1, before_guess: bool = False
) -> Player:
    """A schedule step by step: what each rank computes, and of how many micro-batches it holds the activations.

    The player opens at its last frame, which shows all steps and the most micro-batches that each rank has held; before
    a guess it opens where micro-batch 0 has reached the last stage.

    The schedules are the package's, with ideal times: a forward takes one step, a backward two. Where a schedule
    computes the weights' gradients apart, these take one of the two. With ``chunks`` v each rank has v stages of 1/v of
    its layers, and a step is 1/v as long.

    Args:
        kind: "gpipe", "one_f_one_b", "interleaved", "zb_h1" or "zb_v".
        stages: p, the ranks. micro_batches: m. chunks: v, for "interleaved"; 2 for "zb_v".
        before_guess: whether a reader guesses behind it how long a rank is idle: then no frame says so in words.

    Raises:
        ValueError: an unknown kind, chunks of another kind, or more steps than can be read.
    """
    from pardemo import pipeline_parallel as pp  # brings torch

    if kind not in KINDS:
        raise ValueError(f"a schedule is one of {', '.join(KINDS)}, not {kind!r}")
    if chunks > 1 and kind not in ("interleaved", "zb_v"):
        raise ValueError(f"{kind} has one chunk on each rank, not {chunks}")
    schedule = pp.Schedule(getattr(pp, kind), stages, micro_batches, chunks)
    course = Course.of(schedule)
    most = int((640 - course.left - _RIGHT) / _NARROW)
    if course.steps > most or micro_batches > 10 or stages > 6:
        raise ValueError(
            f"up to 6 stages, 10 micro-batches and {most} steps can be drawn; this is {stages} stages, {micro_batches} "
            f"micro-batches and {course.steps} steps"
        )
    frames = [
        (schedule_frame(course, now), _caption(course, kind, now, before_guess)) for now in range(course.steps + 1)
    ]
    many = f", {chunks} chunks each" if chunks > 1 else ""
    name = f"{KINDS[kind]} with {micro_batches} micro-batches on {stages} ranks{many}"
    return Player(frames, name, start=stages if before_guess else -1, first=0)


@dataclass(frozen=True)
class Course:
    """A schedule, the begin and end of each of its computations, and the sizes of their drawing."""

    schedule: "Schedule"
    times: Times

    @classmethod
    def of(cls, schedule: "Schedule") -> "Course":
        """With ideal times: a forward takes one step, a backward two."""
        from pardemo.pipeline_parallel.timetable import chart, kind_of

        times = {
            (step.stage, step.micro_batch, kind_of(step)): (round(begin), round(end))
            for step, (begin, end) in chart(schedule, schedule.chunks, 2 * schedule.chunks).times.items()
        }
        return cls(schedule, times)

    @property
    def steps(self) -> int:
        return max(end for _, end in self.times.values())

    def of_rank(self, rank: int) -> Times:
        return {
            computation: span
            for computation, span in self.times.items()
            if self.schedule.rank_of(computation[0]) == rank
        }

    def holds(self, rank: int, now: int) -> int:
        """How many pairs (stage, micro-batch) of this rank have ended their forward and not yet their last backward."""
        last = "weight gradients" if self.schedule.is_split else "backward"
        ended = [kind for (_, _, kind), (_, end) in self.of_rank(rank).items() if end <= now]
        return ended.count("forward") - ended.count(last)

    def most(self, rank: int) -> int:
        return max(self.holds(rank, now) for now in range(self.steps + 1))

    def running(self, rank: int, now: int) -> Computation | None:
        """The computation that a rank runs in the step that ends at ``now``; None if it is idle."""
        return next(
            (computation for computation, (begin, end) in self.of_rank(rank).items() if begin < now <= end), None
        )

    def idle(self, rank: int, now: int) -> list[tuple[int, int]]:
        """(begin, end) of each stretch up to ``now`` in which a rank was idle."""
        busy = sorted((begin, min(end, now)) for begin, end in self.of_rank(rank).values() if begin < now)
        gaps = pairwise([(0, 0), *busy, (now, now)])
        return [(end, begin) for (_, end), (begin, _) in gaps if end < begin]

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("forward", "backward", "weight gradients")[: 2 + self.schedule.is_split]

    @property
    def left(self) -> float:
        return 76 if self.schedule.chunks == 1 else 96

    @property
    def wide(self) -> float:
        return (640 - self.left - _RIGHT) / self.steps

    @property
    def lane(self) -> float:
        """The height of a stage."""
        return 42 if self.schedule.chunks == 1 else 30

    def top(self, rank: int) -> float:
        return _TOP + rank * (self.schedule.chunks * self.lane + _GAP)


def schedule_frame(course: Course, now: int) -> Canvas:
    """A schedule as it stands after ``now`` steps: a row for each rank, grey where it was idle."""
    schedule, left, wide, lane = course.schedule, course.left, course.wide, course.lane
    canvas = Canvas(640, course.top(schedule.ranks) + 40)
    canvas.text(left, 20, f"after {now} of {course.steps} steps", "start", bold=True, size=20)
    canvas.text(636, 20, "held at most" if now == course.steps else "holds", "end", bold=True, size=20)
    high = schedule.chunks * lane
    idle = [
        (left + begin * wide, course.top(rank), (end - begin) * wide, high)
        for rank in range(schedule.ranks)
        for begin, end in course.idle(rank, now)
    ]
    canvas.boxes(idle, DONE["idle"], border=DONE["idle"])
    for kind in course.kinds:
        places, numbers, runs = [], [], []
        for (stage, k, step_kind), (begin, end) in sorted(course.times.items()):
            if step_kind == kind and begin < now:
                rank, chunk = schedule.rank_of(stage), stage // schedule.ranks  # a lane for each chunk
                x, y = left + begin * wide, course.top(rank) + chunk * lane
                until = (min(end, now) - begin) * wide
                (runs if now <= end else places).append((x, y + 2, until, lane - 4))
                numbers.append((x + until / 2, y + lane / 2, str(k)))
        canvas.boxes(places, DONE[kind])
        canvas.boxes(runs, DONE[kind], border="currentColor", thick=3)
        canvas.texts(numbers, fill=ink_on(DONE[kind]))
    for rank in range(schedule.ranks):
        _row(canvas, course, rank, now)
    canvas.line([(left + now * wide, _TOP - 8), (left + now * wide, course.top(schedule.ranks) - _GAP + 6)], thick=2)
    split = {"forward": "forward F", "backward": "input I", "weight gradients": "weights W"}
    names = split if schedule.is_split else {}
    kinds = {names.get(kind, kind): DONE[kind] for kind in (*course.kinds, "idle")}
    legend(canvas, 20, course.top(schedule.ranks) + 16, kinds | {"held": KEPT["activations"]})
    return canvas


def _row(canvas: Canvas, course: Course, rank: int, now: int) -> None:
    schedule, top, lane = course.schedule, course.top(rank), course.lane
    high = schedule.chunks * lane
    canvas.box(course.left, top, 640 - _RIGHT - course.left, high, thick=0.8)
    canvas.text(8, top + high / 2, f"rank {rank}", "start")
    if schedule.chunks > 1:
        canvas.text(course.left - 6, 44, "stage", "end") if rank == 0 else None
        for chunk, stage in enumerate(schedule.stages_of(rank)):
            canvas.text(course.left - 16, top + (chunk + 0.5) * lane, str(stage))
    pairs = course.most(rank) if now == course.steps else course.holds(rank, now)
    most = max(course.most(r) for r in range(schedule.ranks))
    x = 640 - _RIGHT + 14
    canvas.text(x, top + high / 2 - 10, f"{round(pairs / schedule.chunks, 2):g}", "start", bold=True, size=20)
    each = min(12, (_RIGHT - 22) / most)
    canvas.boxes([(x + k * each, top + high / 2 + 6, each, 14) for k in range(pairs)], KEPT["activations"])


def _caption(course: Course, kind: str, now: int, before_guess: bool) -> str:
    schedule = course.schedule
    p, v = schedule.ranks, schedule.chunks
    if now == 0:
        caption = "A forward takes one step, a backward two. "
        if schedule.is_split:
            caption = (
                "F (forward), I (the input's gradient) and W (the weights' gradients) take one step each. "
                "W may come at any time after I. "
            )
        caption += "The right column counts the micro-batches whose activations a rank holds."
        return caption + f" Each rank has {v} stages of 1/{v} of its layers, so a step is 1/{v} as long." * (v > 1)
    running = {rank: course.running(rank, now) for rank in range(p)}
    parts = []
    for step_kind in course.kinds:
        busy = [
            f"rank {rank} with micro-batch {computation[1]}"
            for rank, computation in running.items()
            if computation and computation[2] == step_kind
        ]
        parts += [f"{_name(step_kind, schedule.is_split)}: {', '.join(busy)}."] if busy else []
    if waiting := [str(rank) for rank, computation in running.items() if computation is None]:
        parts.append(f"Rank{'s' * (len(waiting) > 1)} {_and(waiting)} wait{'s' * (len(waiting) == 1)}.")
    most = course.most(0)
    if course.holds(0, now) == most and all(course.holds(0, before) < most for before in range(now)):
        parts.append(f"Rank 0 holds {round(most / v, 2):g} now, and will never hold more.")
    if now == course.steps:
        parts.append("Done. Grey is idle time." if before_guess else _idle(course, kind))
    return " ".join(parts)


def _idle(course: Course, kind: str) -> str:
    p, m, v = course.schedule.ranks, course.schedule.micro_batches, course.schedule.chunks
    if not course.schedule.is_split:
        share, formula = formulas.bubble_of_total(p, m, v), "(p − 1)/(m + p − 1)" if v == 1 else "(p − 1)/(v·m + p − 1)"
        return f"Done. {share:.0%} of the total time was idle: {unbroken(formula)}."
    share = 1 - 3 * m * v / course.steps
    caption = f"Done. {share:.0%} of the total time was idle"
    if m < (p if kind == "zb_h1" else 2 * p - 1):  # then no formula holds
        return f"{caption}: too few micro-batches to fill the pipeline."
    if kind == "zb_h1":
        return f"{caption}: {unbroken('(p − 1)/(3m + p − 1)')}."
    return f"{caption}: {unbroken('(p − 1)/(6m + p − 1)')}, all of it before a rank began or after it had ended."


def _name(step_kind: str, is_split: bool) -> str:
    letters = {"forward": "F", "backward": "I", "weight gradients": "W"}
    return letters[step_kind] if is_split else step_kind.capitalize()


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


_LEFT, _SCALE = 100, 1.38
_COMPUTE, _MESSAGE = {"forward": 44, "backward": 66}, 40  # how long one part of each takes
#: The halves of a forward and of a backward, behind each of which a message travels.
_IN_TURN, _TOGETHER = ("forward", "forward", "backward", "backward"), ("forward", "backward") * 2


@drawing(318)
def a_pair(canvas: Canvas) -> None:
    """A forward and a backward, each of two parts with a message behind each part. One after the other the GPU is idle
    during all four messages. Together it computes a part of one while the message of the other travels, and is done
    sooner."""
    in_turn = list(accumulate((_COMPUTE[kind] + _MESSAGE for kind in _IN_TURN), initial=0))
    at_once = list(accumulate((_COMPUTE[kind] for kind in _TOGETHER), initial=0))
    _case(canvas, 14, "one after the other: the GPU waits for each message", _IN_TURN, in_turn)
    _case(canvas, 154, "together: while one sends, the other computes", _TOGETHER, at_once)
    legend(canvas, 20, 296, {name: DONE[name] for name in ("forward", "backward", "communication", "idle")})


def _case(canvas: Canvas, y: float, title: str, kinds: tuple[str, ...], begins: list[float]) -> None:
    canvas.text(4, y, title, "start", bold=True)
    for lane, name in ((y + 22, "GPU"), (y + 72, "network")):
        canvas.text(4, lane + 20, name, "start")
    ends = [begin + _COMPUTE[kind] for begin, kind in zip(begins, kinds, strict=False)]
    for end, following in zip(ends, begins[1:], strict=True):
        if following > end:
            canvas.box(_LEFT + end * _SCALE, y + 22, (following - end) * _SCALE, 40, DONE["idle"], border=DONE["idle"])
    for kind, begin, end in zip(kinds, begins, ends, strict=False):
        of = {"forward": "F", "backward": "B"}[kind]
        canvas.box(_LEFT + begin * _SCALE, y + 22, (end - begin) * _SCALE, 40, DONE[kind], of)
        canvas.box(_LEFT + end * _SCALE, y + 74, _MESSAGE * _SCALE, 36, DONE["communication"], f"{of}'s")


_TALK = DONE["communication"]
_STAGES_LEFT, _STAGES_GAP = 104, 44  # where the first rank begins, and the way to the next


@drawing(282)
def pipeline_stages(canvas: Canvas, ranks: int = 4) -> str:
    """A model cut into stages of two layers: activations are sent to the next rank, their gradients back.

    Args:
        ranks: p, from 2 to 4.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 4:
        raise ValueError(f"a pipeline of 2 to 4 ranks can be drawn, not of {ranks}")
    wide = (632 - _STAGES_LEFT - (ranks - 1) * _STAGES_GAP) / ranks
    canvas.text(40, 16, "batch", bold=True)
    for number in range(8):
        canvas.box(12, 34 + 22 * number, 56, 22, KEPT["activations"], thick=1)
    canvas.text(40, 228, "8 micro-")
    canvas.text(40, 250, "batches")
    canvas.arrow([(72, 81), (_STAGES_LEFT + 4, 81)], thick=2.5)
    for rank in range(ranks):
        x = _STAGES_LEFT + rank * (wide + _STAGES_GAP)
        canvas.text(x + wide / 2, 16, f"rank {rank}", bold=True)
        canvas.box(x, 34, wide, 176, thick=1)  # no colour: arrows and layers have one
        for layer in range(2):
            name = f"layer {2 * rank + layer + 1}"
            canvas.box(x + 8, 58 + 74 * layer, wide - 16, 46, KEPT["parameters"], name)
        canvas.arrow([(x + wide / 2, 105), (x + wide / 2, 131)], thick=2.5)
        if rank == ranks - 1:
            canvas.text(x + wide / 2, 194, "loss")
        else:  # from this rank's second layer up to the next rank's first, and back
            canvas.arrow([(x + wide - 7, 143), (x + wide + _STAGES_GAP + 7, 69)], _TALK)
            canvas.arrow([(x + wide + _STAGES_GAP + 7, 95), (x + wide - 7, 169)], _TALK, dashed=True)
    canvas.arrow([(_STAGES_LEFT, 234), (_STAGES_LEFT + 52, 234)], _TALK)
    canvas.text(_STAGES_LEFT + 64, 234, "activations of one micro-batch, A bytes", "start")
    canvas.arrow([(_STAGES_LEFT + 52, 264), (_STAGES_LEFT, 264)], _TALK, dashed=True)
    canvas.text(_STAGES_LEFT + 64, 264, "their gradients, A bytes, on the way back", "start")
    return (
        f"A model of {2 * ranks} layers on {ranks} ranks, two layers on each. A batch comes in as eight micro-batches; "
        "between neighbours travel a micro-batch's activations, and on the way back their gradients."
    )


@drawing()
def two_chunks(canvas: Canvas, ranks: int = 4) -> str:
    """Two stages on each rank, placed in two ways: rank by rank twice (interleaved 1F1B), and as a V (ZB-V).

    Args:
        ranks: p, from 2 to 5.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 5:
        raise ValueError(f"two stages on each of 2 to 5 ranks can be drawn, not of {ranks}")
    canvas.height = 54 + 62 * ranks
    for left, name, upward in ((84, "round and round", False), (400, "down and up: a V", True)):
        second = [2 * ranks - 1 - rank if upward else ranks + rank for rank in range(ranks)]
        canvas.text(left + 116, 18, name, bold=True, size=20)
        places: dict[int, tuple[float, float]] = {}
        for rank in range(ranks):
            y = 48 + 62 * rank
            canvas.text(left - 12, y + 21, f"rank {rank}", "end")
            for x, stage in ((left, rank), (left + 148, second[rank])):
                canvas.box(x, y, 84, 42, rank_colour(rank), f"stage {stage}")
                places[stage] = x, y
        for stage, after in pairwise(sorted(places)):
            _hand_on(canvas, places[stage], places[after])
    return (
        f"Two stages on each of {ranks} ranks. Round and round, rank i has stages i and {ranks} + i, and the last rank "
        f"hands on to the first. As a V, rank i has stages i and {2 * ranks - 1} − i: the last rank hands on to "
        "itself, and the first rank has the last stage."
    )


def _hand_on(canvas: Canvas, place: tuple[float, float], after: tuple[float, float]) -> None:
    """An arrow for an activation: to the rank below or above, to the same rank's other stage, or to the first rank."""
    (x, y), (to, below) = place, after
    if x == to:
        down = below > y
        canvas.arrow([(x + 42, y + (44 if down else -2)), (x + 42, below + (-2 if down else 44))], _TALK)
    elif y == below:
        canvas.arrow([(x + 87, y + 21), (to - 3, y + 21)], "currentColor")  # on one rank: nothing is sent
    else:
        canvas.arrow([(x + 87, y + 21), (x + 116, y + 21), (x + 116, below + 21), (to - 3, below + 21)], _TALK)


_WEIGHT, _GRADIENT = KEPT["parameters"], KEPT["gradients"]
_FIRST, _LAST, _WIDE = 104, 432, 84  # where embedding and output layer stand, and how wide they are


@drawing(420)
def tied_weights(canvas: Canvas) -> None:
    """A matrix E that is embedding and output layer. In one process it has one gradient, to which both uses add. In two
    stages each rank has its own E and its own part of the gradient, and an all-reduce adds the parts."""
    canvas.text(4, 14, "one process: one E, one gradient", "start", bold=True)
    _layers(canvas, 34)
    canvas.box(212, 34, 196, 44, "none", "blocks")
    canvas.box(_FIRST, 114, _LAST + _WIDE - _FIRST, 38, _GRADIENT, "E's gradient: both uses add to it")
    canvas.text(4, 184, "two stages: each has its own E and sees its own use", "start", bold=True)
    for rank, x in enumerate((92, 324)):
        canvas.text(x + 102, 212, f"rank {rank}", bold=True)
        canvas.box(x, 226, 204, 136, thick=1, dashed=True)
    _layers(canvas, 234)
    for x in (212, 336):
        canvas.box(x, 234, 72, 44, "none", "blocks")
    canvas.arrow([(287, 256), (333, 256)], _TALK)
    first, last = _FIRST + _WIDE / 2, _LAST + _WIDE / 2
    for x in (_FIRST, _LAST):
        canvas.box(x, 314, _WIDE, 38, _GRADIENT, "a part")
    canvas.arrow([(first, 356), (first, 386), (last, 386), (last, 356)], _TALK, 4, both=True)
    canvas.text(310, 406, "all-reduce: the parts are added", fill=_TALK, bold=True)


def _layers(canvas: Canvas, y: float) -> None:
    """Tokens, E, …, E, loss, and an arrow from each E down to its gradient."""
    canvas.text(4, y + 22, "tokens", "start")
    canvas.arrow([(70, y + 22), (_FIRST - 3, y + 22)], thick=2.5)
    for x in (_FIRST, _LAST):
        canvas.box(x, y, _WIDE, 44, _WEIGHT, "E", size=22)
        canvas.arrow([(x + _WIDE / 2, y + 47), (x + _WIDE / 2, y + 78)], _GRADIENT)
    for left, right in ((_FIRST + _WIDE + 3, 209), (411, _LAST - 3), (_LAST + _WIDE + 3, 556)):
        canvas.arrow([(left, y + 22), (right, y + 22)], thick=2.5)
    canvas.text(564, y + 22, "loss", "start")


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
    frames = [(schedule_frame(course, now), _v_caption(course, now)) for now in range(course.steps + 1)]
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
