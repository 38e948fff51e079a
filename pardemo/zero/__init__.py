"""ZeRO: data parallelism whose ranks each keep a part of the model states that are equal on all of them.

To read first: :mod:`pardemo.zero.plain`, ZeRO-1, ZeRO-2 and ZeRO-3 with ``torch.distributed`` alone.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
1910.02054). Parameters are gathered, and gradients reduced, in the module's own precision (bf16); the optimizer
updates fp32 shards:

- :class:`Zero1` (P_os): each rank updates one shard of the parameters and hands the result round.
- :class:`Zero2` (P_os+g): gradients are reduced bucket by bucket as they appear; each rank keeps its shard of the sum.
- :class:`Zero3` (P_os+g+p): parameters too are kept in shards; a layer is gathered for its forward and its backward.
  It is torch's FSDP2.

Everything travels on pardemo's ring: a reduce-scatter of the gradients, an all-gather of the parameters.
"""

from pardemo.zero.checkpoint import load, save
from pardemo.zero.stage3 import Zero3, default_layers
from pardemo.zero.stages import Zero1, Zero2

__all__ = ["Zero1", "Zero2", "Zero3", "default_layers", "load", "save"]
