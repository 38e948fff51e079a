"""A pipeline's schedule, one time step after the other."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pardemo.draw.canvas import Canvas
from pardemo.draw.palette import DONE, KEPT, ink_on
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
    canvas.text(left, 20, f"after {now} of {course.steps} steps", anchor="start", bold=True)
    canvas.text(636, 20, "held at most" if now == course.steps else "holds", anchor="end", bold=True)
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
    canvas.text(8, top + high / 2, f"rank {rank}", size=18, anchor="start")
    if schedule.chunks > 1:
        canvas.text(course.left - 6, 44, "stage", size=18, anchor="end") if rank == 0 else None
        for chunk, stage in enumerate(schedule.stages_of(rank)):
            canvas.text(course.left - 16, top + (chunk + 0.5) * lane, str(stage), size=18)
    pairs = course.most(rank) if now == course.steps else course.holds(rank, now)
    most = max(course.most(r) for r in range(schedule.ranks))
    x = 640 - _RIGHT + 14
    canvas.text(x, top + high / 2 - 10, f"{round(pairs / schedule.chunks, 2):g}", anchor="start", bold=True)
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
