"""The unit of sharding: some parameters in one flat tensor, of which each rank updates a chunk.

Three parameters a, b, c on two ranks (N: ranks; chunk = ceil(numel / N); 0: the padding, at most N − 1 elements)::

    flat        [ a a a a a b b b | b c c c c c c 0 ]      [N · chunk]
    rank 0 owns   a a a a a b b b                          [chunk], its master in fp32, its gradient, Adam's states
    rank 1 owns                     b c c c c c c 0        [chunk]

    reduce      flat gradients of all ranks -> their sum, of which a rank gets its own chunk
    gather      both chunks -> flat on every rank, of which a, b and c are views
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.collectives import chunk_numel
from pardemo.collectives.channel import Channel
from pardemo.zero.param_groups import ParamGroups


class Unit:
    """Some parameters in one flat tensor of N equal chunks, of which this rank owns one. Padded by at most N − 1.

    The values are the group's first rank's. The parameters stay as they are until :meth:`show`, so that an engine that
    is refused before leaves no trace in its module. Collective.

    Args:
        name: whose parameters these are, the same on every rank: exchanges are compared by it.
        parameters: of one dtype and device, all trained, of one parameter group.
        group_index: the number of that parameter group.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], group_index: int, channel: Channel):
        self.name, self.parameters, self.group_index, self.channel = name, list(parameters), group_index, channel
        self.rank, size = channel.rank, channel.size
        self.numel = sum(p.numel() for p in self.parameters)
        self.chunk = chunk_numel(self.numel, size)
        self.flat = self.parameters[0].detach().new_zeros(self.chunk * size)  # [N · chunk]
        self._views = self.views(self.flat)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            view.copy_(parameter.detach())
        if size > 1:
            dist.broadcast(self.flat, dist.get_global_rank(channel.group, 0), group=channel.group)
        self.shard = self.flat[self.rank * self.chunk :][: self.chunk]  # [chunk]
        #: what the optimizer updates: the chunk in fp32; the same memory where the parameters are fp32
        self.master = nn.Parameter(self.shard.float())
        self.gradient: torch.Tensor | None = None  # [chunk] of the sum over ranks and micro-batches

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a flat tensor [N · chunk]: views of it, each in its parameter's shape."""
        parts = flat[: self.numel].split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def pieces(self, chunk: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor, int]]:
        """Returns what of each parameter lies in this rank's chunk (part of one, several whole ones, nothing), and the
        number of its first element within the parameter."""
        begin = -self.rank * self.chunk
        for parameter in self.parameters:
            end = begin + parameter.numel()
            if end > 0 and begin < self.chunk:
                yield parameter, chunk[max(begin, 0) : end], max(-begin, 0)
            begin = end

    def as_dtensor(self, chunk: torch.Tensor, mesh: Any) -> torch.Tensor:
        """All ranks' chunks as one DTensor [numel], in the same memory; without the padding."""
        from torch.distributed.tensor import DTensor, Shard

        rows = chunk.detach()[: max(0, min(self.chunk, self.numel - self.rank * self.chunk))]
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size([self.numel]), stride=(1,))

    def show(self) -> None:
        """Puts the parameters where the flat tensor is."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def shows(self) -> bool:
        """Whether the parameters are still where the flat tensor is."""
        return all(p.data_ptr() == view.data_ptr() for p, view in zip(self.parameters, self._views, strict=True))

    def pack_gradients(self) -> torch.Tensor:
        """Moves the parameters' gradients into a new flat tensor; zero where a parameter took no part."""
        flat = torch.zeros_like(self.flat)  # [N · chunk]
        with torch.no_grad(), compat.without_functions():  # as they are: this is who may read them
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
        """Gathers the updated masters of all ranks into the flat tensor, whose views the parameters are."""
        self.shard.copy_(self.master.detach())  # back to the parameters' precision
        self.channel.all_gather(self.shard, self.flat, f"{self.name}, {when}")  # [chunk] of each to [N · chunk]

    def update_master(self) -> None:
        """Copies values that were written into the parameters to the master; all others keep their fp32 digits."""
        if self.master.dtype != self.shard.dtype:
            written = self.shard != self.master.to(self.shard.dtype)
            if written.any():
                self.master.data[written] = self.shard[written].float()


def make_units(
    parameters: Sequence[nn.Parameter], groups: ParamGroups, bucket_bytes: float, channel: Channel
) -> list[Unit]:
    """Units of one dtype, device and parameter group each, about in the order in which a backward pass completes them.

    A unit is closed when it has reached ``bucket_bytes``.
    """
    parts: list[tuple[tuple, list[nn.Parameter]]] = []
    open_parts: dict[tuple, tuple[list[nn.Parameter], float]] = {}
    for parameter in reversed(parameters):
        kind = groups.number(parameter), parameter.dtype, parameter.device
        part, room = open_parts.get(kind, ([], 0.0))
        if room <= 0:
            part, room = [], bucket_bytes
            parts.append((kind, part))
        part.append(parameter)
        open_parts[kind] = part, room - parameter.numel() * parameter.element_size()
    position = {parameter: at for at, parameter in enumerate(reversed(parameters))}
    parts.sort(key=lambda part: max(position[parameter] for parameter in part[1]))
    return [Unit(f"unit {number}", part, kind[0], channel) for number, (kind, part) in enumerate(parts)]
