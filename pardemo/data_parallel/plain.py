"""Data parallelism with hooks and buckets, as the chapter *Data parallelism* builds it (section 5).

Leads to :class:`pardemo.data_parallel.BucketedDataParallel`, which finishes by itself when ``backward()`` ends, skips
the exchange between micro-batches, keeps buffers alike, and says so when the ranks' models or uses of them differ.

Every rank has the whole model and its own part of the batch. The backward pass begins with the last layer, so the
bucket of the last layers travels while the layers before them are still computed::

    backward   | layer 4 | layer 3 | layer 2 | layer 1 |
    all-reduce                     | bucket 4+3        | bucket 2+1        |  finish(): wait, then / N
"""

import torch
import torch.distributed as dist
from torch import nn


class Bucket:
    """Parameters whose gradients travel as one message."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None):
        self.parameters, self.group = parameters, group
        self.missing = len(parameters)
        self.sent: tuple[torch.Tensor, dist.Work] | None = None

    def add(self) -> None:
        """Counts one more gradient that is there; the last one sends the bucket, and nobody waits for it."""
        if self.sent is not None:
            raise RuntimeError("a second backward pass before finish(): call it after every one")
        self.missing -= 1
        if self.missing == 0:
            self.send()

    def send(self) -> tuple[torch.Tensor, dist.Work]:
        """Begins the all-reduce of all gradients in one flat tensor, [numel of all]."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])  # [numel of all]
        self.sent = flat, dist.all_reduce(flat, group=self.group, async_op=True)
        return self.sent

    def finish(self) -> None:
        """Waits for the sum and puts the mean into ``.grad``."""
        flat, message = self.sent or self.send()  # sent only now where a parameter took no part in this pass
        message.wait()
        means = (flat / dist.get_world_size(self.group)).split([p.numel() for p in self.parameters])
        for parameter, mean in zip(self.parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter).clone()
        self.missing, self.sent = len(self.parameters), None


class PlainDataParallel(nn.Module):
    """``module`` on every rank; after ``loss.backward()`` and :meth:`finish`, ``.grad`` is the mean over the ranks.

    >>> model = PlainDataParallel(model)                        # doctest: +SKIP
    >>> loss_of(model(my_inputs), my_targets).backward()        # doctest: +SKIP
    >>> model.finish()                                          # doctest: +SKIP
    >>> optimizer.step()                                        # doctest: +SKIP

    Where all ranks have the same number of samples, the mean over the ranks is the mean over the batch.

    Args:
        module: the model; every rank begins with rank 0's values.
        bucket_bytes: gradients are collected until they have so many bytes.
        group: the data-parallel ranks; the default group when None.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 1 << 20, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        self.buckets: list[Bucket] = []
        waiting: list[nn.Parameter] = []
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):  # as backward makes them
            waiting.append(parameter)
            if sum(p.nbytes for p in waiting) >= bucket_bytes:
                self._close_bucket(waiting, group)
                waiting = []
        if waiting:
            self._close_bucket(waiting, group)

    def _close_bucket(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        bucket = Bucket(parameters, group)
        self.buckets.append(bucket)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: bucket.add())

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.module(*args)

    def finish(self) -> None:
        """Waits until all buckets have come back. Collective: after every backward, before the optimizer's step."""
        for bucket in self.buckets:
            bucket.finish()
