"""Data parallelism: every rank holds the whole model, sees its part of the batch, and averages gradients.

Two wrappers, in the order in which a reader should meet them:

- :class:`NaiveDataParallel`: after the backward pass, one all-reduce per parameter.
- :class:`BucketedDataParallel`: gradients are packed into buckets of some MiB, and a bucket's all-reduce runs
  while the backward pass still computes the next ones (Li et al. 2020, "PyTorch Distributed: Experiences on
  Accelerating Data Parallel Training", §3.2).

Both start all ranks from rank 0's parameters and buffers, broadcast buffers before each forward in training
mode, and leave the **mean** of the ranks' gradients in ``.grad`` when ``backward()`` returns. Activation
checkpointing works in its non-reentrant form.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from pardemo.buckets import Bucket, split_into_buckets
from pardemo.channel import Channel
from pardemo.collectives import ring_all_reduce
from pardemo.meters.timeline import Timeline

AllReduce = Callable[[torch.Tensor, dist.ProcessGroup | None], torch.Tensor]


class _DataParallel(nn.Module):
    """What the wrappers share: the common start, buffers, ``no_sync``, and the call at the end of a backward."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        all_reduce: AllReduce,
        timeline: Timeline | None,
    ):
        super().__init__()
        self.module = module
        self.group = group if group is not None else dist.group.WORLD
        self.size = dist.get_world_size(self.group)
        self.timeline = timeline
        self._all_reduce_with = all_reduce
        self._sync = True
        self._backward = -1  # autograd's number of the backward pass that is being noted
        self._source = dist.get_global_rank(self.group, 0)
        self.parameters_to_sync = [p for p in module.parameters() if p.requires_grad]
        if not self.parameters_to_sync:
            raise ValueError("the module has no parameter that requires a gradient: nothing to run in parallel")
        self._compare_models()
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                self._broadcast(tensor)
        own = all_reduce is ring_all_reduce and not any(p.is_cuda for p in self.parameters_to_sync)
        self._channel = Channel(self.group, "data parallel", links=own)
        # Through a weak reference: the collector cannot see the cycle parameter, hook, wrapper, and a forgotten
        # wrapper would go on sending.
        ready = weakref.WeakMethod(self._gradient_is_ready)
        hooks = [
            p.register_post_accumulate_grad_hook(lambda p: (call := ready()) and call(p))
            for p in self.parameters_to_sync
        ]
        weakref.finalize(self, _remove, hooks).atexit = False

    def forward(self, *args, **kwargs):
        if self.training:
            with torch.no_grad():
                for buffer in self.module.buffers():
                    self._broadcast(buffer)
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block backward passes only accumulate; the first one after it sends the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _compare_models(self) -> None:
        """All ranks need the same model: a difference would end in a hang much later."""
        mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self.module.named_parameters()]
        models: list = [None] * self.size
        dist.all_gather_object(models, mine, group=self.group)
        for rank, theirs in enumerate(models):
            if theirs != models[0]:
                pairs = zip_longest(models[0], theirs, fillvalue="no parameter")
                here, there = next((a, b) for a, b in pairs if a != b)
                raise ValueError(f"the ranks' models differ: rank 0 has {here}, rank {rank} has {there}")

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self.size > 1:
            dist.broadcast(tensor.data, self._source, group=self.group)

    def _gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """Runs when autograd has added the last contribution to ``parameter.grad`` in this backward pass."""
        if not self._sync or self.size == 1:
            return
        if parameter.grad.is_sparse:
            raise TypeError("sparse gradients are not supported: make the embedding with sparse=False")
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # the first gradient of this backward pass
            self._backward = backward
            self._on_backward_begin()
            Variable._execution_engine.queue_callback(self._on_backward_end)  # as torch's DDP and FSDP2 do
        self._on_gradient(parameter)

    def _all_reduce(self, tensor: torch.Tensor, name: str) -> None:
        span = self.timeline.span("communication", name) if self.timeline else contextlib.nullcontext()
        with span:
            if self._all_reduce_with is ring_all_reduce:
                self._channel.all_reduce(tensor, name)
            else:
                self._channel.compare(tensor, name)
                self._all_reduce_with(tensor, self.group)

    def _on_backward_begin(self) -> None: ...

    def _on_gradient(self, parameter: nn.Parameter) -> None: ...

    def _on_backward_end(self) -> None: ...


class NaiveDataParallel(_DataParallel):
    """Averages each parameter's gradient on its own, after the backward pass has ended.

    Nothing overlaps, and every small tensor pays the latency of 2(N−1) messages. A parameter that took no
    part counts as zero; one that took part on no rank ends with a zero gradient.

    Args:
        module: the model; its parameters and buffers are overwritten with rank 0's.
        group: the ranks that share the work; the default group when None.
        all_reduce: ``ring_all_reduce`` or ``parameter_server_all_reduce``, or any function of that form.
        timeline: where to note the communication.

    Raises:
        ValueError: no parameter requires a gradient, or the ranks' models differ.
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
        for index, parameter in enumerate(self.parameters_to_sync):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(self.size)
            self._all_reduce(parameter.grad, f"gradient {index}")


class BucketedDataParallel(_DataParallel):
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
        ValueError: no parameter requires a gradient, the ranks' models differ, ``bucket_bytes`` is not positive.
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
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self._next = 0
        self._sending: list[Future] = []
        on_cuda = self.buckets[0].flat.is_cuda
        self._stream = torch.cuda.Stream(self.buckets[0].flat.device) if on_cuda else None

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[parameter]
        bucket.take(parameter, self.size)
        if self.overlap:
            while self._next < len(self.buckets) and self.buckets[self._next].full:
                self._send_next()

    def _on_backward_begin(self) -> None:
        for future in self._sending:  # of a backward pass that failed half-way: let it leave the buckets alone first
            future.exception()
        self._sending, self._next = [], 0
        for bucket in self.buckets:
            bucket.taken.clear()

    def _on_backward_end(self) -> None:
        while self._next < len(self.buckets):  # those that unused parameters left incomplete
            self.buckets[self._next].fill_gaps(self.size)
            self._send_next()
        sending, self._sending, self._next = self._sending, [], 0
        for future in sending:
            future.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for bucket in self.buckets:
            bucket.hand_out()

    def _send_next(self) -> None:
        bucket, name = self.buckets[self._next], f"bucket {self._next}"
        self._next += 1
        packed = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._sending.append(self._channel.submit(self._exchange, bucket.flat, name, packed))

    def _exchange(self, flat: torch.Tensor, name: str, packed: "torch.cuda.Event | None") -> None:
        """In the channel's thread; on CUDA in a stream of its own, once packed."""
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            if self._stream:
                self._stream.wait_event(packed)
            self._all_reduce(flat, name)


def _remove(hooks: list) -> None:
    for hook in hooks:
        hook.remove()


def shard_weight(samples: int, group: dist.ProcessGroup | None = None) -> float:
    """The factor for this rank's *mean* loss when the ranks' shards differ in size: N·samples / all samples.

    With it the mean of the ranks' gradients is the gradient of the whole batch's mean; without it a sample of a
    small shard weighs more than one of a large shard. It is 1 on every rank when the shards are equal.

    Raises:
        ValueError: a negative number of samples, or none on any rank.
    """
    if samples < 0:
        raise ValueError(f"a shard cannot have {samples} samples")
    from pardemo.rank import device

    total = torch.tensor([float(samples)], dtype=torch.float64, device=device())
    dist.all_reduce(total, group=group)
    if total.item() == 0:
        raise ValueError("no rank has a sample")
    return dist.get_world_size(group) * samples / total.item()
