"""ZeRO-1, ZeRO-2 and ZeRO-3 with a flat shard, a reduce-scatter and an all-gather.

The chapter *ZeRO's memory* (sections 2 to 4) builds what each rank keeps, and *ZeRO's traffic* (sections 1 to 3) what
the ranks send. Leads to :class:`pardemo.zero.Zero1`, :class:`pardemo.zero.Zero2` and :class:`pardemo.zero.Zero3`,
which add buckets, prefetching, clipping by the norm of the whole model, settings for groups of parameters, tied and
frozen parameters, checkpointing, and checks of all of it.

The parameters of a unit (a layer, or the model) lie behind one another in one flat tensor, which is cut into N shards.
Each rank keeps and updates one of them::

    flat       [ weight ........ | bias .. | zeros ]      gradients
                  |         |         |        |               |   reduce-scatter: the sum of every shard to its rank
    shards     [  rank 0 |  rank 1 |  rank 2 | rank 3 ]   shard.grad
                  |         |         |        |               |   optimizer.step() on the shard alone
    flat       [ weight ........ | bias .. | zeros ]      all-gather: the new shards to all ranks

| | whole on every rank | one shard on each | gathered |
|---|---|---|---|
| ZeRO-1 | parameters, gradients | optimizer states | parameters, after the step |
| ZeRO-2 | parameters | and gradients: reduced within backward | parameters, after the step |
| ZeRO-3 | nothing but the unit that computes | and parameters | a unit, before its forward and its backward |
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Unit:
    """Parameters that lie in one flat tensor, of which this rank owns a shard, in fp32."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None):
        self.parameters, self.group = list(parameters), group
        self.ranks = dist.get_world_size(group)
        self.flat = self._packed([p.detach() for p in self.parameters])  # [N · numel of a shard]
        dist.broadcast(self.flat, group=group, group_src=0)
        self.nbytes = self.flat.untyped_storage().nbytes()
        for parameter, view in zip(self.parameters, self._views(), strict=True):
            parameter.data = view
        chunk = self.flat.chunk(self.ranks)[dist.get_rank(group)]
        self.shard = nn.Parameter(chunk.float().clone())  # [numel of a shard]
        self.missing = len(self.parameters)

    def reduce(self) -> None:
        """Adds this shard's gradient, the mean over the ranks, to ``shard.grad``; frees the whole gradient."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        packed = self._packed(gradients)  # [N · shard]
        mine = packed.new_empty(self.shard.shape)  # [shard]
        dist.reduce_scatter_single(mine, packed, group=self.group)
        mean = mine.float() / self.ranks
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        for parameter in self.parameters:
            parameter.grad = None
        self.missing = len(self.parameters)

    def gather(self) -> None:
        """Gathers all ranks' shards into the flat tensor, and so into the parameters, which are views of it."""
        self.flat.untyped_storage().resize_(self.nbytes)
        dist.all_gather_single(self.flat, self.shard.detach().to(self.flat.dtype), group=self.group)

    def free(self) -> None:
        """Gives the flat tensor's memory back. What autograd has kept of it is valid again after :meth:`gather`."""
        self.flat.untyped_storage().resize_(0)

    def _packed(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Tensors one after the other in a flat one, with zeros up to the next multiple of N."""
        numel = sum(tensor.numel() for tensor in tensors)
        return torch.cat([*(t.reshape(-1) for t in tensors), tensors[0].new_zeros(-numel % self.ranks)])

    def _views(self) -> list[torch.Tensor]:
        pieces = self.flat[: sum(p.numel() for p in self.parameters)].split([p.numel() for p in self.parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]


class PlainZero1(nn.Module):
    """ZeRO-1: optimizer states in shards.

    >>> engine = PlainZero1(model, partial(torch.optim.AdamW, lr=1e-3))   # doctest: +SKIP
    >>> loss_of(engine(my_inputs), my_targets).backward()                 # doctest: +SKIP
    >>> engine.step()                                                     # doctest: +SKIP

    Args:
        module: the model, on every rank; every rank begins with rank 0's values. All parameters are trained.
        optimizer: makes an optimizer from a list of parameters, here the shards; it has to work element by element.
        group: the data-parallel ranks; the default group when None.
    """

    def __init__(self, module: nn.Module, optimizer: MakeOptimizer, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.units = [Unit(parameters, group) for parameters in self._cut()]
        self.optimizer = optimizer([unit.shard for unit in self.units])

    def _cut(self) -> list[list[nn.Parameter]]:
        return [list(self.module.parameters())]

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.module(*args)

    def step(self) -> None:
        """Collective: reduces the gradients, updates this rank's shards, and gathers the new parameters."""
        for unit in self.units:
            unit.reduce()
        self._update()
        for unit in self.units:
            unit.gather()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainZero2(PlainZero1):
    """ZeRO-2: gradients in shards, too. A layer's gradients are reduced as soon as backward has made the last of them.

    Args: as for :class:`PlainZero1`. A unit is a child of the module (a layer of an ``nn.Sequential``) with parameters;
        all of them take part in every pass.
    """

    def __init__(self, module: nn.Module, optimizer: MakeOptimizer, group: dist.ProcessGroup | None = None):
        super().__init__(module, optimizer, group)
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, unit=unit: self._gradient_is_there(unit))

    def _layers(self) -> list[nn.Module]:
        return [layer for layer in self.module.children() if list(layer.parameters())]

    def _cut(self) -> list[list[nn.Parameter]]:
        return [list(layer.parameters()) for layer in self._layers()]

    def _gradient_is_there(self, unit: Unit) -> None:
        unit.missing -= 1
        if unit.missing == 0:
            unit.reduce()

    def step(self) -> None:
        """Collective: as in :class:`PlainZero1`, without the reduce-scatter, which backward has done."""
        self._update()
        for unit in self.units:
            unit.gather()


class PlainZero3(PlainZero2):
    """ZeRO-3: parameters in shards, too. A layer is whole while it computes, and at no other time::

    forward    gather 1 | layer 1 | free 1   gather 2 | layer 2 | free 2
    backward            gather 2 | layer 2 | reduce 2, free 2   gather 1 | layer 1 | reduce 1, free 1
    """

    def __init__(self, module: nn.Module, optimizer: MakeOptimizer, group: dist.ProcessGroup | None = None):
        super().__init__(module, optimizer, group)
        for layer, unit in zip(self._layers(), self.units, strict=True):
            unit.free()
            layer.register_forward_pre_hook(lambda layer, args, unit=unit: unit.gather())
            layer.register_forward_hook(lambda layer, args, y, unit=unit: unit.free())
            layer.register_full_backward_pre_hook(lambda layer, dy, unit=unit: unit.gather())  # type: ignore[misc]

    def _gradient_is_there(self, unit: Unit) -> None:
        super()._gradient_is_there(unit)
        if unit.missing == len(unit.parameters):  # all were there, and have been reduced
            unit.free()

    def step(self) -> None:
        """Updates this rank's shards; the next forward gathers them. Sends nothing."""
        self._update()
