"""torch's DistributedDataParallel with its communication noted on a timeline."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardemo.meters.timeline import Timeline


def timed_ddp(module: nn.Module, timeline: Timeline, bucket_bytes: int = 25 << 20) -> DistributedDataParallel:
    """DDP whose all-reduces are torch's own, each noted from its start to its end."""
    ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_bytes / 2**20)

    def all_reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        begin, name = time.monotonic(), f"bucket {bucket.index()}"
        tensor = bucket.buffer().div_(group.size())
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()

        def done(finished: torch.futures.Future) -> torch.Tensor:
            timeline.add("communication", name, begin, time.monotonic())
            return finished.value()[0]

        return future.then(done)

    ddp.register_comm_hook(dist.group.WORLD, all_reduce)
    return ddp
