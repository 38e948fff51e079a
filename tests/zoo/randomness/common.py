"""What these scripts share: Megatron's two operators and layers, a random state of each rank's own, training."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WIDTH = 16


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


def arguments() -> tuple[argparse.Namespace, DeviceMesh]:
    """The options of a script, and the ranks as data-parallel × tensor-parallel ones."""
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 8), ("accumulate", 1), ("tp", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // args.tp, args.tp)
    return args, init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def train(
    args: argparse.Namespace,
    model: nn.Module,
    dp: dist.ProcessGroup,
    lr: float,
    wanted: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.roll(1, dims=1),
    shape: tuple[int, ...] = (WIDTH,),
) -> None:
    """Trains on samples of a shape, of which the model is to make what is `wanted`; gradients are averaged over dp."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(args.batch * args.accumulate * dp.size(), *shape, generator=generator)
        printed = 0
        for m in range(args.accumulate):
            mine = x[torch.arange(args.batch) + (m * dp.size() + dp.rank()) * args.batch]
            loss = F.mse_loss(model(mine), wanted(mine)) / args.accumulate
            loss.backward()
            printed += loss.detach()
        average_gradients(model, dp)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed, group=dp)
        if dist.get_rank() == 0:
            print(f"step {step} loss {printed / dp.size():.4f}")
