"""Layers that are alike are run once: a dry run of many layers from two of a few, event by event.

Where that is not so the whole model is run, once for all micro-batches: samples by the million and three, a prime, so
that a storage's size says whether it is one of samples.
"""

import contextlib
import copy
import math

import numpy as np

from pardemo.planner import engine_without_model, engines, gradient_buckets, names
from pardemo.planner.composed import composed
from pardemo.planner.dryrun import dry_run
from pardemo.planner.footprint import Footprint
from pardemo.planner.job import RankJob
from pardemo.planner.records import Life
from pardemo.planner.repeats import Irregular, MemoryEvent, Stretch
from pardemo.planner.samples import AnyBatch, counts_of, of_samples, split

#: Architectures whose layers are all alike: the tests compare them with whole dry runs.
ALIKE = ("llama", "qwen2", "qwen3", "mistral", "baichuan", "gpt2")
FEW = 5  # layers of the deeper of the two runs: its third is like its fourth, in whatever section
SAMPLES = (1_000_003, 1_000_033)


def any_batch(job: RankJob) -> AnyBatch | None:
    """The job's dry run with any number of samples from two on; None where their number may change what happens."""
    if not may_be_any_batch(job):
        return None
    layers = _needed(job)
    if _layers_alike(job) and job.config.num_hidden_layers > (2.5 if job.stage == 3 else 2) * layers:
        with contextlib.suppress(Irregular):
            return stretched(job, layers)
    return AnyBatch.of(dry_run(job.but(batch=SAMPLES[0])))


def _needed(job: RankJob) -> int:
    """Layers of the deeper of two runs.

    Stage 3 keeps layers gathered, and gathers ahead: so many more at each end, and between them until it goes on alike.
    """
    if job.stage != 3:
        return FEW
    window = max(job.zero.get(name, 10**9) for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance"))
    one = engines.layers_of(engines.outline(with_layers(job, 1)))[0]
    return 3 + 3 * max(1, math.ceil(window / sum(parameter.numel() for parameter in one.parameters())))


def may_be_any_batch(job: RankJob) -> bool:
    """Whether :func:`any_batch` may say something: without looking."""
    return job.config.model_type in ALIKE


def _layers_alike(job: RankJob) -> bool:
    return len(set(getattr(job.config, "layer_types", None) or [0])) == 1


def with_layers(job: RankJob, layers: int) -> RankJob:
    """The job of a model that has only so many."""
    config = copy.deepcopy(job.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return job.but(config=config)


def stretched(job: RankJob, layers: int = FEW) -> AnyBatch:
    """From dry runs of ``layers - 1`` and of ``layers`` layers.

    Raises:
        Irregular: they do not show what more layers would do.
    """
    few, many = (
        dry_run(with_layers(job, n).but(batch=samples))
        for n, samples in zip((layers - 1, layers), SAMPLES, strict=True)
    )
    if job.stage in engine_without_model.STAGES:
        return composed(job, few, many)
    more = job.config.num_hidden_layers - layers
    middle = (layers - 2) // 2
    parameters = dict(names.by_layer(many.sizes, middle, more))
    seen = [gradient_buckets.found(one) for one in (few, many)]
    later = gradient_buckets.of(job, parameters, seen)
    stretch = Stretch(*(_sections(one, runs) for one, runs in zip((few, many), seen, strict=True)))
    script = _Script(many)
    for section, life, size, event, number in stretch.events(more):
        script.begins(section)
        if event.look != gradient_buckets.LOOK:
            script.happens(life, size, event, number, event.source.death == event.when)
            continue
        for place, elements in enumerate(later):
            for sign in (1, -1):
                script.happens(
                    (section, place), (sign * gradient_buckets.BYTES * elements, False), event, None, sign < 0
                )
    starts = script.starts_of(len(stretch.many))
    counts = names.counts(counts_of(few), counts_of(many), middle, more)
    counts["kernels"] = gradient_buckets.kernels(counts["kernels"], seen, len(later), more)
    return AnyBatch(
        job, parameters, counts, [(name, starts[number]) for number, (name, _) in enumerate(many.phases, start=2)],
        script.lives, script.line_of, np.array(script.who), *split(script.sizes), starts[1], starts[2],
    )  # fmt: skip


class _Script:
    """What happens with all layers, as it is told event by event; storages are like those of ``run``."""

    def __init__(self, run: Footprint):
        self._run = run
        self._ids: dict[object, int] = {}
        self._starts: dict[int, int] = {}
        self.lives: list[Life] = []
        self.line_of: list[int] = []
        self.who: list[int] = []
        self.sizes: list[tuple[int, bool]] = []

    def begins(self, section: int) -> None:
        self._starts.setdefault(section, len(self.who))

    def happens(self, life: object, size: tuple[int, bool], event: MemoryEvent, number: int | None, last: bool) -> None:
        place = len(self.who)
        if life not in self._ids:
            self._ids[life] = len(self.lives)
            like = copy.copy(event.source)
            like.module = like.module if number is None else names.renamed(like.module, number)
            like.birth, like.death = place, None
            self.lives.append(like)
            self.line_of.append(self._run.line_of[event.life])
        if last:
            self.lives[self._ids[life]].death = place + 1
        self.who.append(self._ids[life])
        self.sizes.append(size)

    def starts_of(self, sections: int) -> list[int]:
        """The first event of each; of one without events the next one's."""
        found, after = [], len(self.who)
        for section in reversed(range(sections)):
            after = self._starts.get(section, after)
            found.append(after)
        return found[::-1]


def _sections(found: Footprint, summed: gradient_buckets.Sums) -> list[list[MemoryEvent]]:
    """What happens while the model is built, what is left of the first step, and each phase of the second one."""
    first, built = found.first_event, found.built
    who, nbytes = found.changes.T
    before, between = (np.bincount(who[a:first], nbytes[a:first], len(found.lives)) for a in (0, built))
    early = set(who[:built].tolist())
    kept = [
        (life, int(between[life]), None)
        for life in dict.fromkeys(who[built:first].tolist())
        if between[life] and (before[life] >= 1 or life in early)
    ]
    ends = [place + first for _, place in found.phases[1:]] + [len(who)]
    starts = [place + first for _, place in found.phases]
    spans = [(0, built), *zip(starts, ends, strict=True)]
    told = {n for begin, end in summed.places for n in range(begin + 1, end)}  # by its first event alone
    pieces = [[(int(who[n]), int(nbytes[n]), n) for n in range(*span) if n not in told] for span in spans]
    pieces.insert(1, kept)
    found_events = [[_event(found, *one) for one in piece] for piece in pieces]
    begins = {begin + 1 for begin, _ in summed.places}
    for events in found_events:
        for event in events:
            if event.when in begins:
                event.look, event.size = gradient_buckets.LOOK, (0, False)
    return found_events


def _event(found: Footprint, life: int, nbytes: int, place: int | None) -> MemoryEvent:
    one, size = found.lives[life], of_samples(nbytes, found.job.batch)
    module = names.masked(one.module)
    look = (nbytes > 0, int(found.line_of[life]), one.phase, module, one.origin, one.kind, size[1])
    return MemoryEvent(look, life, size, names.number(one.module), one, None if place is None else place + 1)
