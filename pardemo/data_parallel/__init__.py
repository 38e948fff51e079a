"""Data parallelism: every rank holds the whole model, sees its part of the batch, and averages gradients.

To read first: :mod:`pardemo.data_parallel.plain`, hooks and buckets with ``torch.distributed`` alone.

Two wrappers, in the order in which a reader should meet them:

- :class:`NaiveDataParallel`: after the backward pass, one all-reduce per parameter.
- :class:`BucketedDataParallel`: gradients are packed into buckets of some MiB, and a bucket's all-reduce runs
  while the backward pass still computes the next ones (Li et al. 2020, "PyTorch Distributed: Experiences on
  Accelerating Data Parallel Training", 3.2).

Both start all ranks from rank 0's parameters and buffers, broadcast buffers before each forward in training
mode, and leave the **mean** of the ranks' gradients in ``.grad`` when ``backward()`` returns. Activation
checkpointing works in both its forms, and several wrapped modules can share a training loop, or one loss.

With a wrapped module, as with torch's DDP:

- ``backward()`` alone averages. ``torch.autograd.grad`` of its parameters gives this rank's gradients (a warning says
  so); of inputs, as in a gradient penalty, that is what is meant. ``backward(create_graph=True)`` is refused.
- ``.grad`` is final when ``backward()`` returns: ``torch.nn.utils.clip_grad_norm_``, a ``GradScaler`` and
  ``optimizer.step(closure)`` do what they do in one process. A closure whose loss the optimizer reads (L-BFGS) has to
  return the ranks' mean.
- Hooks by ``Tensor.register_hook`` see this rank's gradient; those by ``register_post_accumulate_grad_hook`` are
  refused.
- A parameter may be frozen later, on all ranks; on some alone it is an error on all.
- ``copy.deepcopy`` of a wrapper, as averages of weights make it, is the model without exchanges.
- ``torch.compile`` goes inside, around, or of parts. Sparse gradients are refused.
"""

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives import ring_all_reduce
from pardemo.data_parallel.buckets import Bucket, split_into_buckets
from pardemo.data_parallel.exchange import AllReduce
from pardemo.data_parallel.wrapper import Wrapper
from pardemo.meters.timeline import Timeline


class NaiveDataParallel(Wrapper):
    """Averages each parameter's gradient on its own, after the backward pass has ended.

    Nothing overlaps, and every small tensor pays the latency of 2(N−1) messages. A parameter that took no
    part counts as zero; one that took part on no rank ends with a zero gradient.

    Args:
        module: the model; its parameters and buffers are overwritten with rank 0's.
        group: the ranks that share the work; the default group when None.
        all_reduce: ``ring_all_reduce`` or ``parameter_server_all_reduce``, or any function of that form.
        timeline: where to note the communication.

    Raises:
        ValueError: no parameter requires a gradient, the ranks' models differ (their strides, too), a parameter has
            gaps in memory, the module has a wrapper inside or shares a parameter with another wrapper's. From a
            forward: a parameter was unfrozen, added, cast or moved since. From a backward: the ranks are at different
            exchanges; one of them has left a backward pass out, for example.
        RuntimeError: from a forward, the module was wrapped again since.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        all_reduce: AllReduce = ring_all_reduce,
        timeline: Timeline | None = None,
    ):
        super().__init__(module, group, all_reduce, timeline)

    def _on_backward_end(self) -> None:
        for index, parameter in self._trained():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._send(parameter.grad.div_(self.share_of), f"gradient {index}", last=True)

    def _send_zeros(self) -> None:
        for index, parameter in self._trained():
            self._send(torch.zeros_like(parameter), f"gradient {index}", last=True)

    def _trained(self) -> list[tuple[int, nn.Parameter]]:
        """Those that were not frozen since, with their numbers."""
        return [(index, p) for index, p in enumerate(self.parameters_to_sync) if p.requires_grad]


class BucketedDataParallel(Wrapper):
    """Packs gradients into buckets and sends each while the backward pass goes on.

    Buckets are filled in the reverse order of the parameters, which is about the order in which backward
    produces gradients, and are sent strictly in that order, so that all ranks agree without a word. After
    the exchange ``.grad`` is a view into its bucket: no copy back (clone a gradient that you want to keep, the next
    step writes there again). A parameter that took no part on this rank counts as zero; one that took part on no
    rank keeps its gradient as it was (a flag for each parameter travels at the end of its bucket).

    Args:
        module: the model; its parameters and buffers are overwritten with rank 0's.
        group: the ranks that share the work; the default group when None.
        bucket_bytes: a bucket is closed when it has reached this size.
        overlap: False to exchange all buckets after the backward pass (to see what overlap gains).
        all_reduce: ``ring_all_reduce``, or any function of that form.
        timeline: where to note the communication.

    Raises:
        As :class:`NaiveDataParallel`. ValueError: ``bucket_bytes`` is not positive. RuntimeError: from a backward, a
            parameter got a second gradient after its bucket was sent (a layer in two re-entrant checkpoints).
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = 25 << 20,
        overlap: bool = True,
        all_reduce: AllReduce = ring_all_reduce,
        timeline: Timeline | None = None,
    ):
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be above 0, not {bucket_bytes}")
        super().__init__(module, group, all_reduce, timeline)
        self.overlap = overlap
        self.buckets = [Bucket(p) for p in split_into_buckets(self.parameters_to_sync, bucket_bytes)]
        self._bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket.views}
        self._next = 0

    def _on_first_gradient(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.taken.clear()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        number = self._bucket_of[parameter]
        if number < self._next:
            raise RuntimeError(
                "a parameter got a second gradient in one backward pass, after its bucket was sent (a layer in two "
                "re-entrant checkpoints?): checkpoint with use_reentrant=False, or wrap with overlap=False"
            )
        self.buckets[number].take(parameter, self.share_of)
        # the last one waits for the end, when it is known how many forwards had a backward
        while self.overlap and self._next < len(self.buckets) - 1 and self.buckets[self._next].full:
            self._send_next()

    def _on_backward_end(self) -> None:
        while self._next < len(self.buckets):  # the last one, and those that unused parameters left incomplete
            self.buckets[self._next].fill_gaps(self.share_of)
            self._send_next()

    def _on_received(self) -> None:
        for bucket in self.buckets:
            bucket.hand_out()

    def _send_zeros(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.clear()
            self._send_next()

    def _send_next(self) -> None:
        number, self._next = self._next, self._next + 1
        self._send(self.buckets[number].flat, f"bucket {number}", last=self._next == len(self.buckets))


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
