"""What a rank keeps of a dry run's storages: with more ranks, tensor and pipeline parallelism, and offload."""

import numpy as np

from pardemo.planner.footprint import LINES, Footprint, is_bucket, is_cut
from pardemo.planner.records import Life

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


def shares(footprint: Footprint, ranks: int, tp: int, pp: int, in_flight: int, offload: str) -> np.ndarray:
    """[storages]: the part of each storage that a rank has on its GPU.

    Args:
        ranks: the data-parallel ones that are asked for; the dry run may have had fewer.
        in_flight: micro-batches whose activations a pipeline stage holds.
        offload: one of :data:`pardemo.planner.memory.OFFLOADS`.
    """
    fewer = footprint.job.ranks / ranks
    parts = np.zeros(len(footprint.lives))
    for place, life in enumerate(footprint.lives):
        line = LINES[footprint.line_of[place]]
        if not _on_host(line, life, offload):
            part = 1.0 if is_bucket(life, footprint.job) else _model_parallel(line, life, tp, pp, in_flight)
            parts[place] = part * (fewer if _is_sharded(line, life, footprint) else 1.0)
    return parts


def _is_sharded(line: str, life: Life, footprint: Footprint) -> bool:
    """Whether the engine shards the storage: states, and what the update makes of a shard, in fp32 at most.

    Larger storages of the update are of whole parameters on their way.
    """
    sharded = _SHARDED.get(footprint.job.engine, ())
    if sharded and life.phase == "step" and line == "temporaries":
        return life.nbytes <= 4.1 * footprint.trained_params / footprint.job.ranks
    return line in sharded


def _model_parallel(line: str, life: Life, tp: int, pp: int, in_flight: int) -> float:
    if line in _STATES or life.phase == "step":  # the update's copies have the sizes of what is updated
        return 1 / (tp * pp)
    if line in ("buckets", "gathered parameters", "logits"):
        return 1 / tp  # the first two are of whole layers, however few a stage has
    cut = 1 / tp if is_cut(life.module) else 1.0
    return cut * in_flight / pp if line == "activations" else cut


def _on_host(line: str, life: Life, offload: str) -> bool:
    """Whether offload keeps the storage on the host; DeepSpeed's shards of gradients go with the states."""
    if offload == "none":
        return False
    if offload == "optimizer+parameters" and line in ("parameters", "frozen parameters"):
        return True
    shard = line == "gradients" and life.origin == "engine"
    return line == "optimizer states" or shard or (line == "temporaries" and life.phase == "step")
