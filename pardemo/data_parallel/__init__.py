"""Data parallelism: every rank holds the whole model, sees its part of the batch, and averages gradients.

To read first: :mod:`pardemo.data_parallel.plain`, hooks and buckets with ``torch.distributed`` alone. For use:
:class:`BucketedDataParallel`, torch's DDP over pardemo's ring, and :class:`NaiveDataParallel`, to see what buckets and
overlap gain.
"""

import torch
import torch.distributed as dist

from pardemo.data_parallel.wrappers import BucketedDataParallel, NaiveDataParallel

__all__ = ["BucketedDataParallel", "NaiveDataParallel", "shard_weight"]


def shard_weight(samples: int, group: dist.ProcessGroup | None = None) -> float:
    """The factor for this rank's *mean* loss when the ranks' shards differ in size: N·samples / all samples.

    With it the mean of the ranks' gradients is the gradient of the whole batch's mean; without it a sample of a
    small shard weighs more than one of a large shard. It is 1 on every rank when the shards are equal.

    Raises:
        ValueError: a negative number of samples, or none on any rank.
    """
    if samples < 0:
        raise ValueError(f"a shard cannot have {samples} samples")
    from pardemo.world.rank import device

    total = torch.tensor([float(samples)], dtype=torch.float64, device=device())
    dist.all_reduce(total, group=group)
    if total.item() == 0:
        raise ValueError("no rank has a sample")
    return dist.get_world_size(group) * samples / total.item()
