"""What a dry run found: bytes by kind over the step, the peak, and who caused it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pardemo.peers.states import local
from pardemo.planner.engines import Running
from pardemo.planner.job import Job
from pardemo.planner.records import Life, Recorder

#: The lines of a footprint, from what stays to what comes and goes.
LINES = (
    "parameters",
    "frozen parameters",
    "gradients",
    "optimizer states",
    "gathered parameters",
    "buckets",
    "activations",
    "logits",
    "temporaries",
)


#: Linear layers whose output is whole on every tensor-parallel rank, by the last part of their name.
_ROWS = ("o_proj", "down_proj", "out_proj", "dense_4h_to_h", "c_proj", "w2")
_CUT_INSIDE = ("self_attn", "attn", "attention", "mlp", "feed_forward")


def is_cut(module: str) -> bool:
    """Whether tensor parallelism cuts what a module makes: heads and MLP widths, not the residual stream."""
    parts = module.split(".")
    return parts[-1] not in _ROWS and any(part in _CUT_INSIDE for part in parts)


@dataclass
class Footprint:
    """One rank's step.

    Attributes:
        lines: bytes at the peak, by :data:`LINES`.
        peak_phase, peak_module: what ran when the peak was reached: ``backward``, ``model.layers.3.mlp``.
        timeline: [events, lines], bytes after each event of the step. phases: (name, first event) within it.
        flops: by phase; ``recomputation`` is the forward of checkpointed layers again.
        traffic: bytes that operations element by element read and write, by module; their time is memory's.
        resident_bytes: of what is alive when the step begins.
        seconds: what the dry run took.
    """

    job: Job
    params: int
    trained_params: int
    lines: dict[str, int]
    peak_phase: str
    peak_module: str
    timeline: np.ndarray
    phases: list[tuple[str, int]]
    modules: list[str]
    flops: dict[str, int]
    traffic: dict[str, int]
    resident_bytes: int
    sizes: dict[str, tuple[int, bool]]
    lives: list[Life] = field(repr=False, default_factory=list)
    changes: np.ndarray | None = field(repr=False, default=None)
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The largest sum, of whole tensors."""
        return sum(self.lines.values())

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @classmethod
    def of(cls, job: Job, recorder: Recorder, sizes: Mapping[str, tuple[int, bool]]) -> "Footprint":
        places = {name: place for place, name in enumerate(LINES)}
        number = {id(life): place for place, life in enumerate(recorder.lives)}
        kinds = np.array([places[_line(life, job)] for life in recorder.lives])
        who = np.array([number[id(life)] for life, _ in recorder.events])
        nbytes = np.array([change for _, change in recorder.events], np.int64)
        changes = np.zeros((len(who), len(LINES)), np.int64)
        changes[np.arange(len(who)), kinds[who]] = nbytes
        timeline = changes.cumsum(0)
        first = recorder.first_event
        step = timeline[first:]
        top = int(step.sum(1).argmax())
        culprit = recorder.lives[who[first + top]]
        phases = [(name, place - first) for name, place in recorder.marks if place >= first]
        return cls(
            job=job,
            params=sum(count for count, _ in sizes.values()),
            trained_params=sum(count for count, trained in sizes.values() if trained),
            lines=dict(zip(LINES, (int(v) for v in step[top]), strict=True)),
            peak_phase=culprit.phase,
            peak_module=culprit.module or "the engine",
            timeline=step,
            phases=phases,
            modules=[recorder.lives[w].module for w in who[first:]],
            flops={name: int(v) for name, v in recorder.flops.items() if v},
            traffic=dict(recorder.traffic),
            resident_bytes=int(timeline[first - 1].sum()),
            sizes=dict(sizes),
            lives=recorder.lives,
            changes=np.stack([who, nbytes], 1),
        )


def classify(recorder: Recorder, running: Running, job: Job) -> None:
    """Gives the storages of model states, which the engine names, their kind."""
    listed = dict(running.states())
    frozen = [p for p in running.module.parameters() if not p.requires_grad]
    listed["frozen parameters"] = frozen + [getattr(p, "ds_tensor", None) for p in frozen]
    listed["frozen parameters"] += list(running.module.buffers())
    for kind, tensors in listed.items():
        for tensor in tensors:
            life = None if tensor is None else recorder.life_of(local(tensor))
            if life is not None:
                life.kind = kind
    bucket = 2 * job.zero.get("reduce_bucket_size", 500_000_000)
    for life in recorder.lives:
        if life.nbytes == bucket and life.origin == "engine":  # gradients may lie in the bucket that they are sent in
            life.kind = "buckets"


def _line(life: Life, job: Job) -> str:
    """A record's line: by what it turned out to be, else by who made it and how long it lived."""
    if life.kind != "activations":
        return life.kind
    if life.origin == "gather":
        return "gathered parameters"
    if life.origin == "engine" or life.phase == "build":
        return "buckets"
    if life.width == job.config.vocab_size and life.phase != "step":
        return "logits"
    if life.origin == "optimizer" or life.phase == "step":
        return "temporaries"
    if life.phase == "forward" and life.death_phase != "forward":
        return "activations"
    return "temporaries"
