"""The unit of sharding: some parameters in one flat tensor, of which each rank owns a chunk.

Three parameters a, b, c on two ranks (N: ranks; chunk = ceil(numel / N); 0: the padding, at most N − 1 elements)::

    flat        [ a a a a a b b b | b c c c c c c 0 ]      [N · chunk]
    rank 0 owns   a a a a a b b b                          [chunk], its master in fp32, its gradient, Adam's states
    rank 1 owns                     b c c c c c c 0        [chunk]

    gather      both chunks -> flat on every rank, of which a, b and c are views
    reduce      flat gradients of all ranks -> their sum, of which a rank gets its own chunk
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives import chunk_numel
from pardemo.collectives.channel import Channel
from pardemo.zero.sharded_parameters import ShardedParameter


class Unit:
    """Some parameters in one flat tensor of N equal chunks, of which this rank owns one. Padded by at most N−1.

    The values are the group's first rank's. The parameters themselves stay as they are until :meth:`arrive` (or
    :meth:`free`): an engine that is refused before leaves no trace in its module. Collective.

    Args:
        name: whose parameters these are, the same on every rank: exchanges are compared by it.
        parameters: of one dtype and device, all trained or all frozen, of one parameter group.
        keep_whole: the flat tensor stays, and the shard is a part of it; else the shard is kept on its own, and the
            flat tensor has no memory before the first gather.
        settings: the number of the parameter group.
    """

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], channel: Channel, keep_whole: bool, settings: int = 0
    ):
        self.name, self.parameters, self.channel, self.settings = name, list(parameters), channel, settings
        self.shapes = [p.shape for p in self.parameters]
        self._classes = [type(p) for p in self.parameters]
        self.rank, size = dist.get_rank(channel.group), dist.get_world_size(channel.group)
        self.numel = sum(p.numel() for p in self.parameters)
        self.chunk = chunk_numel(self.numel, size)
        self.flat = self.parameters[0].detach().new_zeros(self.chunk * size)  # [N · chunk]
        self._views = self.views(self.flat)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            view.copy_(parameter.detach())
        if size > 1:
            dist.broadcast(self.flat, dist.get_global_rank(channel.group, 0), group=channel.group)
        self._nothing = self.flat.new_empty(0)
        own = self.flat[self.rank * self.chunk : (self.rank + 1) * self.chunk]  # [chunk]
        self.own, self.shard = own, own if keep_whole else own.clone()
        self.trained = self.parameters[0].requires_grad
        #: what the optimizer updates: the shard in fp32; the shard itself where that is fp32 already
        self.master = nn.Parameter(self.shard.float()) if self.trained else None
        self.gradient: torch.Tensor | None = None  # this rank's chunk of the sum over ranks and micro-batches
        self.expect_gradients()
        self.arriving: Future | None = None
        self.resident = keep_whole
        if not keep_whole:
            self.flat.untyped_storage().resize_(0)

    def expect_gradients(self) -> None:
        """Of a backward pass to come."""
        self.ready: set[nn.Parameter] = set()  # whose gradients are there
        self.full = self.sent = self.late = False  # all are there; they were sent; more came after that

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a flat tensor [N · chunk]: views of it, each in its parameter's shape."""
        parts = flat[: self.numel].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def pieces(self, chunk: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor, int]]:
        """What of each parameter lies in this rank's chunk (a part of one, several whole ones, or nothing), and the
        number of its first element within the parameter."""
        begin = -self.rank * self.chunk
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            end = begin + shape.numel()
            if end > 0 and begin < self.chunk:
                yield parameter, chunk[max(begin, 0) : end], max(-begin, 0)
            begin = end

    def spans(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Where in this rank's chunk each parameter lies; an empty slice where nothing of it does."""
        begin = -self.rank * self.chunk
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            end = begin + shape.numel()
            yield parameter, slice(max(begin, 0), max(0, min(end, self.chunk)))
            begin = end

    def pack_gradients(self) -> torch.Tensor:
        """Moves the parameters' gradients into a new flat tensor; zero where a parameter took no part."""
        flat = self.shard.new_zeros(self.flat.numel())  # [N · chunk]
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
                parameter.grad = None
        return flat

    def reduce(self, flat: torch.Tensor, when: str) -> None:
        """Adds this rank's chunk of the ranks' summed gradients to what it has. ``when``: the same on every rank."""
        part = self.channel.reduce_scatter(flat, f"{self.name}, {when}")  # [N · chunk] of each rank to [chunk]
        self.gradient = part if self.gradient is None else self.gradient.add_(part)

    def gather(self, when: str) -> None:
        """All ranks' shards into the flat tensor, which is where the parameters are."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self.channel.all_gather(self.shard, self.flat, f"{self.name}, {when}")  # [chunk] of each to [N · chunk]
        self.resident = True

    def arrive(self) -> None:
        """Waits for a gather that is under way, and shows the parameters what it brought."""
        self._wait()
        for parameter, view, kind in zip(self.parameters, self._views, self._classes, strict=True):
            parameter.__class__ = kind
            parameter.data = view

    def free(self) -> None:
        """Gives the parameters' memory back; what is left of them is empty, and says so to whoever reads it.

        What autograd saved of them are views of the flat tensor, or they themselves: the next gather fills them again.
        """
        for parameter in self.parameters:
            if not isinstance(parameter, ShardedParameter):
                parameter.data = self._nothing
                parameter.__class__ = ShardedParameter
        try:
            self._wait()
        finally:
            self.flat.untyped_storage().resize_(0)
            self.resident = False

    def take_over(self) -> None:
        """What was written into the whole parameters becomes the shard's and the master's; what was not stays fp32."""
        self.shard.copy_(self.own)
        if self.master is not None and self.master.dtype != self.shard.dtype:
            written = self.shard != self.master.to(self.shard.dtype)
            if written.any():
                self.master.data[written] = self.own[written].float()

    def shows(self) -> bool:
        """Whether the parameters are still where the flat tensor is."""
        return all(p.data_ptr() == view.data_ptr() for p, view in zip(self.parameters, self._views, strict=True))

    def forget_arrival(self) -> None:
        """Waits for a gather that is under way, whatever comes of it."""
        arriving, self.arriving = self.arriving, None
        if arriving is not None:
            arriving.exception()

    def _wait(self) -> None:
        arriving, self.arriving = self.arriving, None
        if arriving is not None:
            arriving.result()
