"""What scripts of this folder share: Megatron's two layers, a model of them, training them."""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH = 16


class _CopyIn(torch.autograd.Function):
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


class _SumOut(torch.autograd.Function):
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
    """A linear layer whose output features are cut over the tensor-parallel group, once `cut` was called."""

    group = None

    def cut(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.weight = nn.Parameter(self.weight.detach().chunk(size, 0)[rank].clone())
        self.bias = nn.Parameter(self.bias.detach().chunk(size, 0)[rank].clone())
        self.weight.is_cut = self.bias.is_cut = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.group is None else _CopyIn.apply(x, self.group))


class RowLinear(nn.Linear):
    """A linear layer whose input features are cut; the bias is whole on each rank and added after the sum."""

    group = None

    def cut(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.weight = nn.Parameter(self.weight.detach().chunk(size, 1)[rank].clone())
        self.weight.is_cut = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = F.linear(x, self.weight)
        return (part if self.group is None else _SumOut.apply(part, self.group)) + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = ColumnLinear(WIDTH, 4 * WIDTH)
        self.fc2 = RowLinear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Model(nn.Module):
    """Two blocks and a head, whole on each rank until their layers are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def cut(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        for block in self.blocks:
            block.fc1.cut(rank, size, group)
            block.fc2.cut(rank, size, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step, the same on each rank and in each layout: inputs and what the model has to answer."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(count, WIDTH, generator=generator)
    return x, 3 * x.roll(1, dims=1)


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Averages each gradient over a group, as DDP does."""
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def arguments(*more: str) -> argparse.Namespace:
    """Options of every script, and those named in `more`, whole numbers; the process group is there then."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    for name in ("accumulate", *more):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    dist.init_process_group("gloo")
    return parser.parse_args()


def train(args: argparse.Namespace, model: nn.Module, after: Callable[[bool], None], dp: dist.ProcessGroup) -> None:
    """`after` is called behind each backward pass, and told whether it was the step's last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(6):
        x, y = samples(step, args.batch * args.accumulate * dp.size())
        printed = 0
        for m in range(args.accumulate):
            mine = torch.arange(args.batch) + (m * dp.size() + dp.rank()) * args.batch
            loss = F.mse_loss(model(x[mine]), y[mine]) / args.accumulate
            loss.backward()
            printed += loss.detach()
            after(m == args.accumulate - 1)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed, group=dp)
        if dist.get_rank() == 0:
            print(f"step {step} loss {printed / dp.size():.4f}")


def train_cut(clip: Callable[..., None]) -> None:
    """The model cut over tensor-parallel ranks; `clip` gets it, the limit, the group and whether it is mended."""
    args = arguments("tp")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    torch.manual_seed(0)
    model = Model()
    if args.tp > 1:
        model.cut(tp.rank(), args.tp, tp)

    def after(last: bool) -> None:
        if last:
            average_gradients(model, dp)
            clip(model, 0.5, tp, args.mended)

    train(args, model, after, dp)
