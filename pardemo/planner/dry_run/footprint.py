"""Describes the result of a dry run: bytes by kind over the step, the peak, and the module that caused it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pardemo import compat
from pardemo.planner.dry_run.engines import Running
from pardemo.planner.dry_run.storage_recorder import Life, StorageRecorder
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.job import BUCKET_ELEMENTS
from pardemo.planner.layouts.layout import Layout

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
_CUT_BY_ROWS = ("o_proj", "down_proj", "out_proj", "dense_4h_to_h", "c_proj", "w2")
_CUT_INSIDE = ("self_attn", "attn", "attention", "mlp", "feed_forward")


def is_cut(module: str) -> bool:
    """Returns whether tensor parallelism cuts what a module makes: heads and MLP widths, not the residual stream."""
    parts = module.split(".")
    return parts[-1] not in _CUT_BY_ROWS and any(part in _CUT_INSIDE for part in parts)


@dataclass
class Footprint:
    """The memory, operations and traffic of one rank's step.

    Attributes:
        lines: bytes at the peak, by :data:`LINES`.
        peak_phase, peak_module: what ran when the peak was reached: ``backward``, ``model.layers.3.mlp``.
        timeline: [events, lines], bytes after each event of the step. phases: (name, first event) within it.
        flops: of one micro-batch, by phase; ``recomputation`` is the forward of checkpointed layers again.
        traffic: of one micro-batch, bytes that operations element by element read and write; their time is memory's.
        step_traffic: those of the update.
        sent: bytes that this rank sends on a ring, by phase, of the last micro-batch and the update.
        building_bytes: the most while model and engine were built: whole parameters, before an engine cuts them.
        sizes: (elements, whether trained) of each parameter by name.
        lives: every storage; line_of: its place in :data:`LINES`. changes: [all events, 2], the number of the storage
            and the change in bytes; the step's begin with ``first_event``.
        seconds: what the dry run took.
    """

    job: RankJob
    params: int
    trained_params: int
    lines: dict[str, int]
    peak_phase: str
    peak_module: str
    timeline: np.ndarray
    phases: list[tuple[str, int]]
    flops: dict[str, int]
    traffic: int
    step_traffic: int
    sent: dict[str, float]
    building_bytes: int
    sizes: dict[str, tuple[int, bool]]
    lives: list[Life] = field(repr=False)
    line_of: np.ndarray = field(repr=False)
    changes: np.ndarray = field(repr=False)
    first_event: int
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The largest sum, of whole tensors."""
        return sum(self.lines.values())

    def data_parallel_bytes(self, dp: int, model_parallel: int = 1) -> tuple[float, float]:
        """Bytes that a rank sends each time gradients are reduced, and once a step: as the engine's own calls say.

        DeepSpeed's default stages 1 and 2 all-reduce the gradients and gather the parameters, 3Ψ instead of the paper's
        2Ψ; its stage 3 gathers a layer as often as it has let go of it; FSDP2 gathers the head and the embedding once.

        Args:
            dp: data-parallel ranks; where the dry run had fewer, what they sent on their ring is scaled.
            model_parallel: tensor-parallel ranks × pipeline stages, each of which has its part.

        Raises:
            ValueError: the dry run was of one rank, so that nothing is known of what several send.
        """
        ranks = self.job.ranks
        if ranks == 1 < dp:
            raise ValueError(f"a dry run of one rank does not tell what {dp} send")
        more = 1.0 if ranks == dp else (dp - 1) / dp * ranks / (ranks - 1)  # of a ring's (N − 1)/N
        reduced = sum(nbytes for phase, nbytes in self.sent.items() if phase != "step")
        return more * reduced / model_parallel, more * self.sent.get("step", 0.0) / model_parallel

    @classmethod
    def of(cls, job: RankJob, recorder: StorageRecorder, sizes: dict[str, tuple[int, bool]]) -> "Footprint":
        """Makes the footprint of the step that a recorder has seen."""
        lives, built, first = recorder.lives, recorder.built, recorder.first_event
        number = {id(life): index for index, life in enumerate(lives)}
        line_of = np.array([LINES.index(_line(life, job)) for life in lives])
        changes = np.array([(number[id(life)], change) for life, change in recorder.events], np.int64)
        storages, nbytes = changes.T
        step = timeline(line_of[storages], nbytes, first)
        top = int(step.sum(1).argmax())
        culprit = lives[storages[first + top]]
        return cls(
            job=job,
            params=sum(count for count, _ in sizes.values()),
            trained_params=sum(count for count, trained in sizes.values() if trained),
            lines=dict(zip(LINES, step[top].tolist(), strict=True)),
            peak_phase=culprit.phase,
            peak_module=culprit.module or "the engine",
            timeline=step,
            phases=[(name, event - first) for name, event in recorder.marks if event >= first],
            flops={name: count for name, count in recorder.flops.items() if count},
            traffic=recorder.traffic,
            step_traffic=recorder.step_traffic,
            sent=dict(recorder.sent),
            building_bytes=int(nbytes[:built].cumsum().max()),
            sizes=sizes,
            lives=lives,
            line_of=line_of,
            changes=changes,
            first_event=first,
        )


def timeline(lines: np.ndarray, nbytes: np.ndarray, first: int) -> np.ndarray:
    """[events from ``first`` on, lines]: bytes after each event, from each event's line and change in bytes."""
    before = np.bincount(lines[:first], nbytes[:first], len(LINES)).astype(nbytes.dtype)
    changes = np.zeros((len(nbytes) - first, len(LINES)), nbytes.dtype)
    changes[np.arange(len(changes)), lines[first:]] = nbytes[first:]
    return before + changes.cumsum(0)


def classify(recorder: StorageRecorder, running: Running, job: RankJob) -> None:
    """Gives the storages of model states, which the engine names, their kind."""
    listed: dict[str, list[Any]] = dict(running.states())
    frozen: list[Any] = [p for p in running.module.parameters() if not p.requires_grad]
    listed["frozen parameters"] = frozen + [getattr(p, "ds_tensor", None) for p in frozen]
    listed["frozen parameters"] += list(running.module.buffers())
    for kind, tensors in listed.items():
        for tensor in tensors:
            life = None if tensor is None else recorder.life_of(compat.local_part(tensor))
            if life is not None:
                life.kind = kind
    for life in recorder.lives:
        if is_bucket(life, job):  # gradients may lie in the bucket that they are sent in
            life.kind = "buckets"


def is_bucket(life: Life, job: RankJob) -> bool:
    """Returns whether a storage is DeepSpeed's buffer for gradients on their way, whose size is a setting."""
    return life.origin == "engine" and life.nbytes == 2 * job.zero.get("reduce_bucket_size", BUCKET_ELEMENTS)


def _line(life: Life, job: RankJob) -> str:
    """Returns a record's line: by what it turned out to be, else by who made it and how long it lived."""
    if life.kind != "activations":
        return life.kind
    if life.origin == "gather":
        return "gathered parameters"
    if life.origin == "optimizer" or life.phase == "step":
        return "temporaries"
    if life.origin == "engine" and (life.phase, life.death_phase) == ("backward", "step"):
        return "gradients"  # a shard, until the update
    if life.origin == "engine" or life.phase == "build":
        return "buckets"
    if life.width == job.config.vocab_size:
        return "logits"
    if life.phase == "forward" and life.death_phase != "forward":
        return "activations"
    return "temporaries"


#: Ranks of a dry run at most, since engines keep lists that grow with them; the shards of more ranks are scaled.
DATA_PARALLEL_MOST = 32

_STATES = ("parameters", "frozen parameters", "gradients", "optimizer states")
#: What engines cut by data-parallel ranks. Stage 2's gradients also pass whole, so that they are not scaled.
_SHARDED = {
    "zero-1": ("optimizer states",),
    "zero-2": ("optimizer states",),
    "zero-3": _STATES,
    "fsdp2": _STATES,
}


def shares_on_gpu(footprint: Footprint, ranks: int, layout: Layout) -> np.ndarray:
    """Returns the part of each storage that a rank has on its GPU, [storages].

    Args:
        ranks: the data-parallel ones that are asked for; the dry run may have had fewer.
        layout: gives tensor-parallel ranks, pipeline stages, micro-batches of a step and the states on the host.
    """
    fewer = footprint.job.ranks / ranks
    parts = np.zeros(len(footprint.lives))
    for index, life in enumerate(footprint.lives):
        line = LINES[footprint.line_of[index]]
        if not _on_host(line, life, layout.host_states):
            part = 1.0 if is_bucket(life, footprint.job) else _model_parallel(line, life, layout)
            parts[index] = part * (fewer if _is_sharded(line, life, footprint) else 1.0)
    return parts


def _is_sharded(line: str, life: Life, footprint: Footprint) -> bool:
    """Returns whether the engine shards the storage: states, and what the update makes of a shard, in fp32 at most.

    Larger storages of the update are of whole parameters on their way.
    """
    sharded = _SHARDED.get(footprint.job.engine, ())
    if sharded and life.phase == "step" and line == "temporaries":
        return life.nbytes <= 4.1 * footprint.trained_params / footprint.job.ranks
    return line in sharded


def _model_parallel(line: str, life: Life, layout: Layout) -> float:
    tp, pp = layout.tp, layout.pp
    if line in _STATES or life.phase == "step":  # the update's copies have the sizes of what is updated
        return 1 / (tp * pp)
    if line in ("buckets", "gathered parameters", "logits"):
        return 1 / tp  # the first two are of whole layers, however few a stage has
    cut = 1 / tp if is_cut(life.module) else 1.0
    in_flight = min(pp, layout.accumulation)  # micro-batches whose activations a stage holds
    return cut * in_flight / pp if line == "activations" else cut


def _on_host(line: str, life: Life, host_states: str) -> bool:
    """Returns whether offload keeps the storage on the host; DeepSpeed's shards of gradients go with the states."""
    if host_states == "none":
        return False
    if host_states == "optimizer+parameters" and line in ("parameters", "frozen parameters"):
        return True
    shard = line == "gradients" and life.origin == "engine"
    return line == "optimizer states" or shard or (line == "temporaries" and life.phase == "step")
