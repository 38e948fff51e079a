"""DeepSpeed's stages 1 to 3 from dry runs of a few layers: the layers repeated, the engine run with all of them.

Two things happen in a step. The layers compute, one like the other: that is computed from two runs of a few layers, as
:mod:`pardemo.planner.layers` does it. And the engine works by itself, by elements: building, within gradients' hooks,
after a backward pass, in the update. What it does there with all layers is what it does with all of them where they
compute nothing (:mod:`pardemo.planner.engine_without_model`); it is put where the layers' run has a cut.

The deeper of the two runs is a check: put together from its own layers and an engine without them, it has to be the
same as before, event by event. Else :class:`~pardemo.planner.repeats.Irregular` is raised.
"""

import copy
import itertools
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from pardemo.planner import names
from pardemo.planner.dryrun import dry_run
from pardemo.planner.footprint import Footprint
from pardemo.planner.job import RankJob
from pardemo.planner.records import Life
from pardemo.planner.repeats import Irregular, MemoryEvent, Stretch
from pardemo.planner.samples import AnyBatch, Counts, counts_of, of_samples, split

CUT = "cut"  # the look of an event that stands for the engine's work there


def composed(job: RankJob, few: Footprint, many: Footprint) -> AnyBatch:
    """The job's dry run from those of a few layers and of one more.

    Raises:
        Irregular: they do not show what more layers would do.
    """
    if job.ranks & (job.ranks - 1):
        raise Irregular("bytes on the wire that are no whole numbers may differ in their last digit")
    layers = _Layers(few, many)
    again = layers.with_engine(many.job, _engine(many.job, layers.order(0)), 0)
    if _shown(again.footprint(many.job.batch)) != _shown(many):
        raise Irregular("an engine that does something else where there are layers")
    more = job.config.num_hidden_layers - many.job.config.num_hidden_layers
    return layers.with_engine(job, _engine(job.but(batch=many.job.batch), layers.order(more)), more)


_ENGINES: dict[tuple[str, tuple[str, ...]], Footprint] = {}


def _engine(job: RankJob, order: list[str]) -> Footprint:
    """The dry run of the engine by itself: it is the same whether layers are recomputed or not."""
    job = job.but(checkpointing=False)
    key = job.described, tuple(order)
    if key not in _ENGINES:
        while len(_ENGINES) > 3:
            del _ENGINES[next(iter(_ENGINES))]
        _ENGINES[key] = dry_run(job, order)
    return _ENGINES[key]


class _Layers:
    """What the layers do, from two runs, and how the engine's part is put in."""

    def __init__(self, few: Footprint, many: Footprint):
        self._few, self._many = few, many
        self._stretch = Stretch(*map(_sections, (few, many)))
        self._middle = (many.job.config.num_hidden_layers - 2) // 2

    def order(self, more: int) -> list[str]:
        """The parameters' names in the order of their gradients, which has to be the same in each backward pass."""
        passes: dict[int, list[str]] = {}
        for section, _, _, event, number in self._stretch.events(more):
            if event.look[0] == CUT and event.source:
                passes.setdefault(section, []).append(_named(event.source, number))
        orders = list(passes.values())
        if not orders or any(order != orders[0] for order in orders):
            raise Irregular("gradients that come in another order each time")
        return orders[0]

    def with_engine(self, job: RankJob, engine: Footprint, more: int) -> AnyBatch:
        """The run with ``more`` layers than the deeper one, and with an engine that was run with as many."""
        script = _Script(self._many, engine)
        spans = _spans(engine)
        if [name for name, *_ in spans] != [name for name, *_ in _spans(self._many)]:
            raise Irregular("another row of phases")
        script.engine(0, engine.built)
        starts: list[int] = []

        def begin_until(section: int) -> None:
            while len(starts) <= section:
                if not starts:
                    script.engine_leaves()
                starts.append(len(script.who))
                phase, begin, end = spans[len(starts) - 1]
                if phase == "step":
                    script.engine(begin, end)

        cuts = iter(engine.cuts[_first_cut(engine) :])
        for section, life, size, event, number in self._stretch.events(more):
            begin_until(section - 1)  # the one before them is what the step before has left
            if event.look[0] == CUT:
                script.cut(life, next(cuts, None), _named(event.source, number))
            else:
                script.layer(life, size, event, number)
        begin_until(len(spans) - 1)
        if next(cuts, None) is not None:
            raise Irregular("more of the engine's work than there is place for")
        marks = [(phase, start) for (phase, *_), start in zip(spans, starts, strict=True)]
        return AnyBatch(
            job, engine.sizes, self._counts(engine, more), marks, script.lives, script.line_of, np.array(script.who),
            *split(script.sizes), engine.built,
            starts[0],
        )  # fmt: skip

    def _counts(self, engine: Footprint, more: int) -> Counts:
        counts = names.counts(_alone(self._few), _alone(self._many), self._middle, more)
        for kind, aside in engine.aside.items():
            for name, count in aside.items():
                constant, of_each = counts[kind].get(name, (0, 0))
                counts[kind][name] = (constant + count, of_each)
        for kind in ("kernels", "sent"):
            if "step" in getattr(engine, kind):
                counts[kind]["step"] = (getattr(engine, kind)["step"], 0)
        counts["step_traffic"] = {"step": (engine.step_traffic, 0)}
        return counts


class _Script:
    """The events of a run, added one by one; storages are the layers', or with a negative number the engine's."""

    def __init__(self, layers: Footprint, engine: Footprint):
        self._layers, self._engine = layers, engine
        self._engines_lives = _engines_lives(engine)
        self._gradients = {life: name for name, _, _, life in engine.cuts if life is not None}
        self._of: dict[str, int] = {}  # the layers' own storage of a parameter's gradient
        self._ids: dict[int, int] = {}
        self.lives: list[Life] = []
        self.line_of: list[int] = []
        self.who: list[int] = []
        self.sizes: list[tuple[int, bool]] = []

    def engine_leaves(self) -> None:
        """Adds the storages that the engine has left from the step before."""
        for life, nbytes in _left(self._engine):
            if life in self._engines_lives:
                self._engines(life, nbytes, None)

    def engine(self, begin: int, end: int) -> None:
        for place in range(begin, end):
            self._engines(*self._engine.changes[place].tolist(), place)

    def cut(self, life: int, cut: tuple[str, int, int, int | None] | None, name: str) -> None:
        """Adds the engine's work on the gradient that is the layers' storage ``life``."""
        if cut is None or cut[0] != name:
            raise Irregular("gradients that come in another order")
        if name:
            self._of[name] = life
        self.engine(*cut[1:3])

    def layer(self, life: int, size: tuple[int, bool], event: MemoryEvent, number: int | None) -> None:
        if life not in self._ids:
            self._begins(life, event.source, self._layers.line_of[event.life], number)
        self._happens(life, size, event.source.death == event.when)

    def _engines(self, life: int, nbytes: int, place: int | None) -> None:
        like, mine = self._engine.lives[life], -1 - life
        if life in self._gradients:
            mine = self._of.get(self._gradients[life], mine)
        if mine not in self._ids:
            if place is not None and like.birth != place:
                raise Irregular("an engine that lets go of what is not its own")
            self._begins(mine, like, self._engine.line_of[life], None)
        self._happens(mine, of_samples(nbytes, self._engine.job.batch), place is not None and like.death == place + 1)

    def _begins(self, life: int, source: Life, line: int, number: int | None) -> None:
        self._ids[life] = len(self.lives)
        like = copy.copy(source)
        like.module = like.module if number is None else names.renamed(like.module, number)
        like.birth, like.death = len(self.who), None
        self.lives.append(like)
        self.line_of.append(int(line))

    def _happens(self, life: int, size: tuple[int, bool], last: bool) -> None:
        if last:
            self.lives[self._ids[life]].death = len(self.who) + 1
        self.who.append(self._ids[life])
        self.sizes.append(size)


def _spans(footprint: Footprint) -> list[tuple[str, int, int]]:
    """(phase, first event, behind the last) of each part of the step."""
    places = [place + footprint.first_event for _, place in footprint.phases] + [len(footprint.changes)]
    return [(name, *span) for (name, _), span in zip(footprint.phases, itertools.pairwise(places), strict=True)]


def _first_cut(footprint: Footprint) -> int:
    return bisect_right([begin for _, begin, _, _ in footprint.cuts], footprint.first_event - 1)


def _left(footprint: Footprint) -> Iterator[tuple[int, int]]:
    """Storages that the step before the recorded one has left, and their bytes."""
    who, nbytes = footprint.changes[: footprint.first_event].T
    before, between = np.bincount(who, nbytes), np.bincount(who[footprint.built :], nbytes[footprint.built :])
    early = set(who[: footprint.built].tolist())
    for life in dict.fromkeys(who[footprint.built :].tolist()):
        if between[life] and (before[life] >= 1 or life in early):
            yield life, int(between[life])


def _engines_lives(footprint: Footprint) -> set[int]:
    """Storages that the engine makes by itself."""
    starts = [begin for _, begin, _, _ in footprint.cuts]

    def within(life: Life) -> bool:
        place = bisect_right(starts, life.birth) - 1
        return place >= 0 and life.birth < footprint.cuts[place][2]

    return {
        number
        for number, life in enumerate(footprint.lives)
        if life.birth < footprint.built or life.phase == "step" or within(life)
    }


def _sections(footprint: Footprint) -> list[list[MemoryEvent]]:
    """The events left from the step before, and those of each part of the step, without the engine's own.

    A cut stands for the engine's.
    """
    engines = _engines_lives(footprint)
    left = [_event(footprint, *change, None) for change in _left(footprint) if change[0] not in engines]
    who, nbytes = footprint.changes.T.tolist()
    cuts = list(enumerate(footprint.cuts))[_first_cut(footprint) :]

    def layers(begin: int, end: int) -> list[MemoryEvent]:
        if any(who[place] in engines for place in range(begin, end)):
            raise Irregular("layers that let go of what is the engine's")
        return [_event(footprint, who[place], nbytes[place], place) for place in range(begin, end)]

    sections = [left]
    for phase, begin, end in _spans(footprint):
        events, place = [], begin
        while phase == "backward" and cuts and cuts[0][1][1] <= end:
            number, (name, start, stop, life) = cuts.pop(0)
            events += layers(place, start)
            look, about = (CUT, names.masked(name)), -1 - number if life is None else life
            events.append(MemoryEvent(look, about, (0, False), names.number(name), name))
            place = stop
        sections.append([] if phase == "step" else events + layers(place, end))
    return sections


def _event(footprint: Footprint, life: int, nbytes: int, place: int | None) -> MemoryEvent:
    record, size = footprint.lives[life], of_samples(nbytes, footprint.job.batch)
    look = (
        nbytes > 0,
        int(footprint.line_of[life]),
        record.phase,
        names.masked(record.module),
        record.origin,
        record.kind,
        size[1],
    )
    return MemoryEvent(look, life, size, names.number(record.module), record, None if place is None else place + 1)


def _named(name: str, number: int | None) -> str:
    return name if number is None else names.renamed(name, number)


def _alone(footprint: Footprint) -> Counts:
    """The counts without the engine's own part."""
    counts = counts_of(footprint)
    for kind, aside in footprint.aside.items():
        counts[kind] = {
            name: (constant - aside.get(name, 0), of_each) for name, (constant, of_each) in counts[kind].items()
            if kind == "traffic" or name != "step"
        }  # fmt: skip
    return counts


def _shown(footprint: Footprint) -> list:
    """All that a dry run records of its step; storages are numbered as they appear."""
    who, nbytes = footprint.changes.T.tolist()
    live_bytes: dict[int, int] = {}
    for life, change in zip(who[: footprint.first_event], nbytes[: footprint.first_event], strict=True):
        live_bytes[life] = live_bytes.get(life, 0) + change
    numbers: dict[int, int] = {}
    events = [item for item in live_bytes.items() if item[1]]
    events += zip(who[footprint.first_event :], nbytes[footprint.first_event :], strict=True)
    rows = [
        (numbers.setdefault(life, len(numbers)), change, int(footprint.line_of[life]), record.phase, record.module,
         record.origin, record.kind)
        for life, change in events
        for record in (footprint.lives[life],)
    ]  # fmt: skip
    return [rows, footprint.lines, footprint.phases, footprint.flops, footprint.traffic, footprint.traffic_of_samples,
            footprint.step_traffic, footprint.kernels, footprint.sent, footprint.resident_bytes,
            footprint.building_bytes]  # fmt: skip
