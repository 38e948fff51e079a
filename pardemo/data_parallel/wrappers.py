"""torch's DistributedDataParallel, with pardemo's ring in place of its all-reduce.

DDP watches the backward pass, packs gradients into buckets and hands each full bucket to a communication hook (Li et
al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 3.2). The hook here divides the
bucket by N and sums it over the ranks in the communication thread, while the backward pass computes the next bucket::

    computes        backward: bucket 1 full | bucket 2 full | bucket 3 full | DDP waits ... | .grad is the mean
                                 hook               hook            hook          ^
    communication                | all-reduce 1     | all-reduce 2  | all-reduce 3 |
"""

import contextlib
import copy
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardemo import compat
from pardemo.argument_checks import above_zero
from pardemo.collectives import ring_all_reduce
from pardemo.collectives.channel import Channel
from pardemo.groups import copy_of, cut_of, cut_within, group_of
from pardemo.meters.timeline import Timeline

AllReduce = Callable[[torch.Tensor, dist.ProcessGroup | None], torch.Tensor]


class BucketHook:
    """DDP's communication hook: the mean of a bucket over the ranks, in a thread of its own.

    Before data moves, the ranks compare which bucket it is, and of which forward pass: a rank that has left a backward
    pass out is told, and its gradients are not added to another step's.

    Args:
        all_reduce: ``ring_all_reduce`` goes over links that nobody else uses; another function sends as it likes.
        overlap: False holds all buckets back until the last is full.
        timeline: notes each exchange as communication.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, all_reduce: AllReduce, overlap: bool,
        timeline: Timeline | None,
    ):  # fmt: skip
        self._all_reduce, self._overlap, self._timeline = all_reduce, overlap, timeline
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        links = all_reduce is ring_all_reduce and device.type == "cpu"
        if not links:  # DDP's own messages in the group would meet those of the communication thread
            group = copy_of(group)
        self.channel = Channel(group, "data parallel", links=links)
        self.forwards = 0  # of the model for training; -1 where ranks may have different numbers of them
        self._forward_label = ""
        #: of parameters of which this rank has a part, what makes a tensor the gradient of the same part
        self.parts: dict[nn.Parameter, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._held: list[tuple[torch.Tensor, int, torch.futures.Future]] = []
        self._exchanges: list[Future] = []

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the exchange of a bucket; DDP waits for the future and takes the gradients from its tensor."""
        if bucket.index() == 0:
            self._begin()
        mean: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[] if self._stream is None else [self._stream.device]
        )
        self._held.append((bucket.buffer().div_(self.channel.size), bucket.index(), mean))
        if bucket.is_last() and compat.in_backward():  # and not for a rank that has joined, whose data has ended
            # called when the pass ends, and once more after DDP's own call there, which waits for the futures; where
            # re-entrant checkpoints make several passes of one, it is the one that DDP waits in
            compat.after_backward(lambda: compat.after_backward(self._end))
        if self._overlap or bucket.is_last():
            packed = torch.cuda.current_stream().record_event() if self._stream is not None else None
            for held in self._held:
                self._exchanges.append(self.channel.submit(self._exchange, *held, self._forward_label, packed))
            self._held = []
        return mean

    def _begin(self) -> None:
        """The first bucket of a backward pass: the exchanges of one that has failed half-way end before it."""
        for exchange in self._exchanges:
            exchange.exception()
        self._exchanges, self._held = [], []
        self._forward_label = f"forward pass {self.forwards}" if self.forwards >= 0 else "any forward pass"

    def _end(self) -> None:
        """The gradients are the mean: raises what went wrong; gradients of parts are shown as such again."""
        exchanges, self._exchanges = self._exchanges, []
        for exchange in exchanges:
            exchange.result()
        for parameter, part_of in self.parts.items():
            if parameter.grad is not None:
                parameter.grad = part_of(parameter.grad)

    def _exchange(
        self, buffer: torch.Tensor, index: int, mean: torch.futures.Future, pass_text: str,
        packed: "torch.cuda.Event | None",
    ) -> None:  # fmt: skip
        """In the communication thread: sums over the ranks. DDP cannot be told of an error: :meth:`_end` raises it."""
        name = f"bucket {index}"
        span = self._timeline.span("communication", name) if self._timeline else contextlib.nullcontext()
        try:
            with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext(), span:
                if self._stream is not None and packed is not None:
                    self._stream.wait_event(packed)
                label = f"{name} of {pass_text}"
                if self._all_reduce is ring_all_reduce:
                    self.channel.all_reduce(buffer, label)
                else:
                    self.channel.compare(buffer, label)
                    self._all_reduce(buffer, self.channel.group)
        finally:
            mean.set_result(buffer)


def _remember_part(parts: dict, parameter: nn.Parameter) -> None:
    """DDP puts plain tensors in the place of gradients; of a cut parameter, norms need to know what it is part of."""
    if (same_kind := getattr(parameter.grad, "same_kind", None)) is not None:
        parts[parameter] = same_kind()


class BucketedDataParallel(DistributedDataParallel):
    """Averages gradients over the ranks bucket by bucket, while the backward pass goes on.

    It is torch's DDP in all that it does, refuses and costs, with :class:`BucketHook` for its all-reduce. Parameters
    and buffers begin as rank 0's, buffers are rank 0's before each forward in training, and ``.grad`` is the ranks'
    mean when ``backward()`` returns; ``no_sync()``, ``join()``, activation checkpointing and several wrapped modules in
    one loop work as with DDP. So the first backward pass has one bucket, after which DDP knows in which order gradients
    come, and a second backward pass through one graph is not averaged. Under ``join()`` the mean is always over all
    ranks. A ``copy.deepcopy`` is the copied ``module`` alone, as an average of weights wants it.

    Args:
        module: the model. group: the ranks with other samples; the default group when None.
        bucket_bytes: a bucket is closed when it has reached this size.
        overlap: False to exchange all buckets after the backward pass (to see what overlap gains).
        all_reduce: ``ring_all_reduce`` or ``parameter_server_all_reduce``, or any function of that form.
        timeline: where to note the communication.
        options: DDP's own, such as ``find_unused_parameters=True`` where a parameter may take no part in a pass.

    Raises:
        ValueError: ``bucket_bytes`` is not positive; the module has layers that are cut over this group. What DDP
            raises: nothing to train, models that differ. From a backward: the ranks are at different exchanges.
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
        **options: Any,
    ):
        above_zero(bucket_bytes, "bucket_bytes")
        group = group_of(group)
        if cut := cut_within(module, group):
            raise ValueError(cut)
        options = {"gradient_as_bucket_view": True, **options}
        # half a byte more: DDP takes MiB and rounds down
        super().__init__(module, process_group=group, bucket_cap_mb=(bucket_bytes + 0.5) / 2**20, **options)
        self.hook = BucketHook(group, self.device, all_reduce, overlap, timeline)
        self.register_comm_hook(None, self.hook.__call__)
        for parameter in module.parameters():
            if parameter.requires_grad and cut_of(parameter):
                parameter.register_post_accumulate_grad_hook(partial(_remember_part, self.hook.parts))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            self.hook.forwards = -1 if compat.is_joining(self) else max(self.hook.forwards, 0) + 1
        return super().forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __getstate__(self) -> dict:
        raise TypeError(
            f"a {type(self).__name__} holds connections to other processes and cannot be pickled: save its "
            "state_dict(), or its .module"
        )


class NaiveDataParallel(BucketedDataParallel):
    """Averages each parameter's gradient by an all-reduce of its own, after the backward pass has ended.

    Nothing overlaps, and every small tensor pays the latency of 2(N−1) messages.

    Args:
        As :class:`BucketedDataParallel`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        all_reduce: AllReduce = ring_all_reduce,
        timeline: Timeline | None = None,
        **options: Any,
    ):
        super().__init__(
            module, group, bucket_bytes=1, overlap=False, all_reduce=all_reduce, timeline=timeline, **options
        )
