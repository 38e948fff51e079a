"""The unit of sharding: some parameters in one flat tensor, of which each rank owns a chunk."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives import chunk_numel, ring_all_gather, ring_reduce_scatter


class Unit:
    """Some parameters in one flat tensor of N equal chunks, of which this rank owns one. Padded by at most N−1."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, keep_whole: bool):
        self.parameters, self.group = list(parameters), group
        self.shapes = [p.shape for p in self.parameters]
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.numel = sum(p.numel() for p in self.parameters)
        self.chunk = chunk_numel(self.numel, size)
        self.flat = self.parameters[0].detach().new_zeros(self.chunk * size)
        self._views = self.views(self.flat)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self._nothing = self.flat.new_empty(0)
        own = self.flat[rank * self.chunk : (rank + 1) * self.chunk]
        self.own, self.shard = own, own if keep_whole else own.clone()
        self.trained = self.parameters[0].requires_grad
        #: what the optimizer updates: the shard in fp32; the shard itself where that is fp32 already
        self.master = nn.Parameter(self.shard.float()) if self.trained else None
        self.gradient: torch.Tensor | None = None  # this rank's chunk of the sum over ranks and micro-batches
        self.ready, self.full = 0, False  # gradients of a backward pass: how many are there, all of them
        self.arriving: Future | None = None
        self.resident = True

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a flat tensor."""
        parts = flat[: self.numel].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def pack_gradients(self) -> torch.Tensor:
        """Moves the parameters' gradients into a new flat tensor; zero where a parameter took no part."""
        flat = self.shard.new_zeros(self.flat.numel())
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        return flat

    def reduce(self, flat: torch.Tensor) -> None:
        """Adds this rank's chunk of the ranks' summed gradients to what it has."""
        part = ring_reduce_scatter(flat, self.group)
        self.gradient = part if self.gradient is None else self.gradient.add_(part)

    def gather(self) -> None:
        """All ranks' shards into the flat tensor, which is where the parameters are."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        ring_all_gather(self.shard, self.group, out=self.flat)
        self.resident = True

    def arrive(self) -> None:
        """Waits for a gather that is under way, and shows the parameters what it brought."""
        if self.arriving is not None:
            self.arriving.result()
            self.arriving = None
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def free(self) -> None:
        """Gives the parameters' memory back; what is left of them is empty, so that no stray use reads freed memory.

        What autograd saved of them are views of the flat tensor, or they themselves: the next gather fills them again.
        """
        if self.arriving is not None:
            self.arriving.result()
            self.arriving = None
        for parameter in self.parameters:
            parameter.data = self._nothing
        self.flat.untyped_storage().resize_(0)
        self.resident = False

    def take_over(self) -> None:
        """What was written into the whole parameters becomes the shard's and the master's."""
        self.shard.copy_(self.own)
        if self.master is not None and not torch.equal(self.shard, self.master.to(self.shard.dtype)):
            self.master.data.copy_(self.own)
