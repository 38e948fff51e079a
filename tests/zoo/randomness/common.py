"""What scripts of this folder share: Megatron's two operators and layers, and a random state of each rank's own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class CopyIn(torch.autograd.Function):
    """Identity forward, all-reduce backward: the f of the Megatron paper (arXiv 1909.08053)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """All-reduce forward, identity backward: the g of the Megatron paper."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ColumnLinear(nn.Linear):
    """A linear layer whose output features are cut over `group`."""

    def cut(self, group: dist.ProcessGroup) -> None:
        rank, size, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self.weight = nn.Parameter(self.weight.detach().chunk(size, 0)[rank].clone())
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.detach().chunk(size, 0)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(CopyIn.apply(x, self.group))


class RowLinear(nn.Linear):
    """A linear layer whose input features are cut over `group`; the bias is whole and added after the sum."""

    def cut(self, group: dist.ProcessGroup) -> None:
        rank, size, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self.weight = nn.Parameter(self.weight.detach().chunk(size, 1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SumOut.apply(F.linear(x, self.weight), self.group) + self.bias


class RandomState:
    """A second state of the random number generator, for regions of a model that are cut (Megatron-core's tracker)."""

    def __init__(self, seed: int) -> None:
        outside = torch.get_rng_state()
        torch.manual_seed(seed)
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Averages each gradient over a group, as DDP does."""
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)
