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
    layer = engines.layers_of(engines.outline(with_layers(job, 1)))[0]
    return 3 + 3 * max(1, math.ceil(window / sum(parameter.numel() for parameter in layer.parameters())))


def may_be_any_batch(job: RankJob) -> bool:
    """Whether :func:`any_batch` may have a result, by the architecture alone."""
    return job.config.model_type in ALIKE


def _layers_alike(job: RankJob) -> bool:
    return len(set(getattr(job.config, "layer_types", None) or [0])) == 1


def with_layers(job: RankJob, layers: int) -> RankJob:
    """The job with a model that has only so many layers."""
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
    buckets = [gradient_buckets.buckets_in(run) for run in (few, many)]
    all_buckets = gradient_buckets.of(job, parameters, buckets)
    stretch = Stretch(*(_sections(run, in_run) for run, in_run in zip((few, many), buckets, strict=True)))
    script = _Script(many)
    for section, life, size, event, number in stretch.events(more):
        script.begins(section)
        if event.look != gradient_buckets.LOOK:
            script.happens(life, size, event, number, event.source.death == event.when)
            continue
        for place, elements in enumerate(all_buckets):
            for sign in (1, -1):
                script.happens(
                    (section, place), (sign * gradient_buckets.BYTES * elements, False), event, None, sign < 0
                )
    starts = script.starts_of(len(stretch.many))
    counts = names.counts(counts_of(few), counts_of(many), middle, more)
    counts["kernels"] = gradient_buckets.kernels(counts["kernels"], buckets, len(all_buckets), more)
    return AnyBatch(
        job, parameters, counts, [(name, starts[number]) for number, (name, _) in enumerate(many.phases, start=2)],
        script.lives, script.line_of, np.array(script.who), *split(script.sizes), starts[1], starts[2],
    )  # fmt: skip


class _Script:
    """The events with all layers, added one by one; storages are like those of ``run``."""

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
        """The first event of each section; of a section without events, the next section's."""
        starts, after = [], len(self.who)
        for section in reversed(range(sections)):
            after = self._starts.get(section, after)
            starts.append(after)
        return starts[::-1]


def _sections(footprint: Footprint, buckets: gradient_buckets.Buckets) -> list[list[MemoryEvent]]:
    """The events while the model is built, those left from the first step, and those of each phase of the second."""
    first, built = footprint.first_event, footprint.built
    who, nbytes = footprint.changes.T
    before, between = (np.bincount(who[a:first], nbytes[a:first], len(footprint.lives)) for a in (0, built))
    early = set(who[:built].tolist())
    leftovers = [
        (life, int(between[life]), None)
        for life in dict.fromkeys(who[built:first].tolist())
        if between[life] and (before[life] >= 1 or life in early)
    ]
    ends = [place + first for _, place in footprint.phases[1:]] + [len(who)]
    starts = [place + first for _, place in footprint.phases]
    spans = [(0, built), *zip(starts, ends, strict=True)]
    inside_buckets = {n for begin, end in buckets.places for n in range(begin + 1, end)}  # by its first event alone
    pieces = [[(int(who[n]), int(nbytes[n]), n) for n in range(*span) if n not in inside_buckets] for span in spans]
    pieces.insert(1, leftovers)
    sections = [[_event(footprint, *change) for change in piece] for piece in pieces]
    begins = {begin + 1 for begin, _ in buckets.places}
    for events in sections:
        for event in events:
            if event.when in begins:
                event.look, event.size = gradient_buckets.LOOK, (0, False)
    return sections


def _event(footprint: Footprint, life: int, nbytes: int, place: int | None) -> MemoryEvent:
    record, size = footprint.lives[life], of_samples(nbytes, footprint.job.batch)
    module = names.masked(record.module)
    look = (nbytes > 0, int(footprint.line_of[life]), record.phase, module, record.origin, record.kind, size[1])
    return MemoryEvent(look, life, size, names.number(record.module), record, None if place is None else place + 1)
