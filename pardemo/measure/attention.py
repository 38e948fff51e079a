"""DTensor's rule for attention on CPUs, which torch has for GPUs alone: a rank computes its heads, or its samples."""

import functools
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from pardemo import compat
from pardemo.measure.libraries import NeedsGpu

#: An axis of queries, keys and values along which attention needs nothing of the other ranks: samples, heads.
AXES = (0, 1)
Placements = list[tuple[list, list]]


@functools.cache
def teach_dtensor() -> None:
    """Has DTensors take the CPU's flash attention, as they take the GPU's; in this process, from here on."""
    register_sharding(compat.attention_cpu.default)(_forward)
    register_sharding(compat.attention_cpu_backward.default)(_backward)


def _forward(query: Any, key: Any, value: Any, *rest: Any, attn_mask: Any = None, **_: Any) -> Placements:
    """Acceptable placements: of output and logsumexp, and of the three inputs."""
    return _alike(2, 3, rest, attn_mask)


def _backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    *rest: Any,
    attn_mask: Any = None,
    **_: Any,
) -> Placements:
    """Of the three gradients, and of the six inputs."""
    return _alike(3, 6, rest, attn_mask)


def _alike(outputs: int, inputs: int, rest: tuple, attn_mask: Any) -> Placements:
    if attn_mask is not None:
        raise NeedsGpu("attention with a mask on DTensors runs on GPUs only: choose is_causal, or local tensors")
    return [([way] * outputs, [way] * inputs + [None] * len(rest)) for way in (Replicate(), *map(Shard, AXES))]
