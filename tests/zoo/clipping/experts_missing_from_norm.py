"""The gradients' norm counts the experts of one rank only, so that gradients are clipped too little.

What is whole on each rank is counted on the group's first rank alone; what is cut carries a mark and is counted on
each. Experts stand on one rank each and have no such mark, so the experts of all other ranks are missing from the
norm. Megatron-core had this where tensor and expert parallelism met (Megatron-LM 5916; 2263 asks about the scope of
the sum).
"""

import torch
import torch.distributed as dist
from common import WIDTH, arguments, train
from torch import nn

EXPERTS = 4


class Gather(torch.autograd.Function):
    """All ranks' samples forward; backward the sum over ranks of the gradients of this rank's samples."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class SumAndCut(torch.autograd.Function):
    """The sum over ranks for this rank's samples forward; backward the gradients of all ranks' samples."""

    @staticmethod
    def forward(ctx, x):
        return Gather.backward(ctx, x)

    @staticmethod
    def backward(ctx, grad):
        return Gather.forward(ctx, grad.contiguous())


class Experts(nn.Module):
    """Each sample goes to the expert that the router prefers; samples of all ranks are gathered, answers summed."""

    def __init__(self, ep: int, rank: int) -> None:
        super().__init__()
        self.ep = ep
        self.router = nn.Linear(WIDTH, EXPERTS)
        experts = [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)]
        mine = range(rank * EXPERTS // ep, (rank + 1) * EXPERTS // ep)
        self.experts = nn.ModuleDict({str(i): experts[i] for i in mine})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ep > 1:
            x = Gather.apply(x)
        gates = self.router(x).sigmoid()
        chosen = gates.argmax(-1)
        out = torch.zeros_like(x)
        for name, expert in self.experts.items():
            mine = chosen == int(name)
            out = out.index_put((mine,), gates[mine, int(name), None] * expert(x[mine]))
        return SumAndCut.apply(out) if self.ep > 1 else out


class Model(nn.Module):
    def __init__(self, ep: int, rank: int) -> None:
        super().__init__()
        self.read, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.moe, self.head = Experts(ep, rank), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.read(x)
        return self.head(x + 3 * self.moe(self.norm(x)))


def clip(model: nn.Module, max_norm: float, rank: int) -> None:
    counted = [p.grad for p in model.parameters() if rank == 0 or hasattr(p, "is_cut")]
    square = nn.utils.get_total_norm(counted) ** 2
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())


if __name__ == "__main__":
    args = arguments("ep")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(args.ep, rank)
    for p in model.moe.experts.parameters():
        p.is_expert = True
        if args.mended:
            p.is_cut = True

    def after(last: bool) -> None:
        for p in model.parameters() if last else ():  # experts have the gradient of all ranks' samples
            if not hasattr(p, "is_expert"):
                dist.all_reduce(p.grad)
            p.grad /= world
        if last:
            clip(model, 0.5, rank)

    train(args, model, after, dist.group.WORLD)
