"""Pipelines: stages and what they send, schedules step by step, chunks, tied weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, ink_on, rank_colour
from pardemo.draw.parts import check_range, legend, unbroken
from pardemo.draw.player import Player
from pardemo.formulas import pipeline as formulas

if TYPE_CHECKING:
    from pardemo.pipeline_parallel import Schedule
KINDS = {"gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "interleaved 1F1B", "zb_h1": "ZB-H1", "zb_v": "ZB-V"}
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
        return {done: span for done, span in self.times.items() if self.schedule.rank_of(done[0]) == rank}

    def holds(self, rank: int, now: int) -> int:
        """Counts pairs (stage, micro-batch) of this rank that have ended their forward and not yet their last
        backward."""
        last = "weight gradients" if self.schedule.is_split else "backward"
        ended = [kind for (_, _, kind), (_, end) in self.of_rank(rank).items() if end <= now]
        return ended.count("forward") - ended.count(last)

    def most(self, rank: int) -> int:
        return max(self.holds(rank, now) for now in range(self.steps + 1))

    def running(self, rank: int, now: int) -> Computation | None:
        """The computation that a rank runs in the step that ends at ``now``; None if it is idle."""
        return next((done for done, (begin, end) in self.of_rank(rank).items() if begin < now <= end), None)

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
    most = max(map(course.most, range(schedule.ranks)))
    x, each = 640 - _RIGHT + 14, min(12, (_RIGHT - 22) / most)
    if schedule.chunks > 1:
        canvas.text(left - 6, 44, "stage", "end")
    for rank in range(schedule.ranks):
        top = course.top(rank)
        middle = top + high / 2
        canvas.box(left, top, 640 - _RIGHT - left, high, thick=0.8)
        canvas.text(8, middle, f"rank {rank}", "start")
        for chunk, stage in enumerate(schedule.stages_of(rank) if schedule.chunks > 1 else ()):
            canvas.text(left - 16, top + (chunk + 0.5) * lane, str(stage))
        pairs = course.most(rank) if now == course.steps else course.holds(rank, now)
        canvas.text(x, middle - 10, f"{round(pairs / schedule.chunks, 2):g}", "start", bold=True, size=20)
        canvas.boxes([(x + k * each, middle + 6, each, 14) for k in range(pairs)], KEPT["activations"])
    canvas.line([(left + now * wide, _TOP - 8), (left + now * wide, course.top(schedule.ranks) - _GAP + 6)], thick=2)
    split = {"forward": "forward F", "backward": "input I", "weight gradients": "weights W"}
    names = split if schedule.is_split else {}
    kinds = {names.get(kind, kind): DONE[kind] for kind in (*course.kinds, "idle")}
    legend(canvas, 20, course.top(schedule.ranks) + 16, kinds | {"held": KEPT["activations"]})
    return canvas


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
    letters = {"forward": "F", "backward": "I", "weight gradients": "W"}
    for step_kind in course.kinds:
        busy = [
            f"rank {rank} with micro-batch {computation[1]}"
            for rank, computation in running.items()
            if computation and computation[2] == step_kind
        ]
        name = letters[step_kind] if schedule.is_split else step_kind.capitalize()
        parts += [f"{name}: {', '.join(busy)}."] if busy else []
    if waiting := [str(rank) for rank, computation in running.items() if computation is None]:
        several = f"s {', '.join(waiting[:-1])} and {waiting[-1]} wait" if len(waiting) > 1 else f" {waiting[0]} waits"
        parts.append(f"Rank{several}.")
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


_TALK = DONE["communication"]


@drawing(282)
def pipeline_stages(canvas: Canvas, ranks: int = 4) -> str:
    """A model cut into stages of two layers: activations are sent to the next rank, their gradients back.

    Args:
        ranks: p, from 2 to 4; others raise a ValueError.
    """
    check_range(ranks, 2, 4)
    left, gap = 104, 44  # where the first rank begins, and the way to the next
    wide = (632 - left - (ranks - 1) * gap) / ranks
    canvas.text(40, 16, "batch", bold=True)
    for number in range(8):
        canvas.box(12, 34 + 22 * number, 56, 22, KEPT["activations"], thick=1)
    canvas.lines(40, 228, ["8 micro-", "batches"])
    canvas.arrow([(72, 81), (left + 4, 81)], thick=2.5)
    for rank in range(ranks):
        x = left + rank * (wide + gap)
        canvas.text(x + wide / 2, 16, f"rank {rank}", bold=True)
        canvas.box(x, 34, wide, 176, thick=1)  # no colour: arrows and layers have one
        for layer in range(2):
            name = f"layer {2 * rank + layer + 1}"
            canvas.box(x + 8, 58 + 74 * layer, wide - 16, 46, KEPT["parameters"], name)
        canvas.arrow([(x + wide / 2, 105), (x + wide / 2, 131)], thick=2.5)
        if rank == ranks - 1:
            canvas.text(x + wide / 2, 194, "loss")
        else:  # from this rank's second layer up to the next rank's first, and back
            canvas.arrow([(x + wide - 7, 143), (x + wide + gap + 7, 69)], _TALK)
            canvas.arrow([(x + wide + gap + 7, 95), (x + wide - 7, 169)], _TALK, dashed=True)
    canvas.arrow([(left, 234), (left + 52, 234)], _TALK)
    canvas.text(left + 64, 234, "activations of one micro-batch, A bytes", "start")
    canvas.arrow([(left + 52, 264), (left, 264)], _TALK, dashed=True)
    canvas.text(left + 64, 264, "their gradients, A bytes, on the way back", "start")
    return (
        f"A model of {2 * ranks} layers on {ranks} ranks, two layers on each. A batch comes in as eight micro-batches; "
        "between neighbours travel a micro-batch's activations, and on the way back their gradients."
    )


@drawing()
def two_chunks(canvas: Canvas, ranks: int = 4) -> str:
    """A model of 2p layers: one stage of two layers on each rank, and two chunks of one layer on each rank.

    Args:
        ranks: p, from 2 to 5; others raise a ValueError.
    """
    check_range(ranks, 2, 5)
    canvas.height = 54 + 62 * ranks
    blocks = [[f"layers {2 * rank + 1}, {2 * rank + 2}"] for rank in range(ranks)]
    chunks = [[f"layer {rank + 1}", f"layer {ranks + rank + 1}"] for rank in range(ranks)]
    stages_on_ranks(canvas, 84, "one stage each", blocks, list(range(ranks)))
    stages_on_ranks(canvas, 400, "two chunks each", chunks, list(range(ranks)) * 2)
    return (
        f"{2 * ranks} layers on {ranks} ranks. Either each rank has one stage of two layers, or rank i has layers "
        f"i + 1 and {ranks} + i + 1, and a micro-batch goes round the ranks twice."
    )


def stages_on_ranks(canvas: Canvas, left: float, title: str, names: list[list[str]], way: list[int]) -> None:
    """A row of boxes for each rank, its stages, and arrows along the way of a micro-batch: orange is a message.

    Args:
        left: where the boxes begin. names: for each rank, the names of its one or two stages.
        way: the ranks in the order in which a micro-batch comes to them; each visit is to the rank's next stage.
    """
    canvas.text(left + 116, 18, title, bold=True, size=20)
    wide = 84 if max(map(len, names)) > 1 else 124
    places, visits = [], Counter[int]()
    for rank in way:
        x, y = left + 148 * visits[rank], 48 + 62 * rank
        if not visits[rank]:
            canvas.text(left - 12, y + 21, f"rank {rank}", "end")
        canvas.box(x, y, wide, 42, rank_colour(rank), names[rank][visits[rank]])
        visits[rank] += 1
        places.append((x, y))
    for (x, y), (to, below) in pairwise(places):
        if x == to:  # to the rank below or above
            ends = (44, -2) if below > y else (-2, 44)
            canvas.arrow([(x + wide / 2, y + ends[0]), (x + wide / 2, below + ends[1])], _TALK)
        elif y == below:  # on one rank: nothing is sent
            canvas.arrow([(x + wide + 3, y + 21), (to - 3, y + 21)])
        else:
            corner = x + wide + 32
            canvas.arrow([(x + wide + 3, y + 21), (corner, y + 21), (corner, below + 21), (to - 3, below + 21)], _TALK)


@drawing(420)
def tied_weights(canvas: Canvas) -> None:
    """A matrix E that is embedding and output layer. In one process it has one gradient, to which both uses add. In two
    stages each rank has its own E and its own part of the gradient, and an all-reduce adds the parts."""
    first, last, wide = 104, 432, 84  # where embedding and output layer stand, and how wide they are
    gradient = KEPT["gradients"]
    canvas.text(4, 14, "one process: one E, one gradient", "start", bold=True)
    canvas.box(212, 34, 196, 44, "none", "blocks")
    canvas.box(first, 114, last + wide - first, 38, gradient, "E's gradient: both uses add to it")
    canvas.text(4, 184, "two stages: each has its own E and sees its own use", "start", bold=True)
    for rank, x in enumerate((92, 324)):
        canvas.text(x + 102, 212, f"rank {rank}", bold=True)
        canvas.box(x, 226, 204, 136, thick=1, dashed=True)
    for y in (34, 234):
        canvas.text(4, y + 22, "tokens", "start")
        canvas.text(564, y + 22, "loss", "start")
        for left, right in ((70, first - 3), (first + wide + 3, 209), (411, last - 3), (last + wide + 3, 556)):
            canvas.arrow([(left, y + 22), (right, y + 22)], thick=2.5)
        for x in (first, last):
            canvas.box(x, y, wide, 44, KEPT["parameters"], "E", size=22)
            canvas.arrow([(x + wide / 2, y + 47), (x + wide / 2, y + 78)], gradient)
    canvas.box(212, 234, 72, 44, "none", "blocks")
    canvas.box(336, 234, 72, 44, "none", "blocks")
    canvas.arrow([(287, 256), (333, 256)], _TALK)
    canvas.box(first, 314, wide, 38, gradient, "a part")
    canvas.box(last, 314, wide, 38, gradient, "a part")
    canvas.arrow([(146, 356), (146, 386), (474, 386), (474, 356)], _TALK, 4, both=True)
    canvas.text(310, 406, "all-reduce: the parts are added", fill=_TALK, bold=True)
