"""What these scripts share: a model under DDP that learns to turn its input by one place, trained on what comes."""

import argparse
from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.answer = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(F.gelu(self.read(x)))


def arguments(**more: int) -> argparse.Namespace:
    """Options of every script, and those named in `more` with their defaults; the process group is there then."""
    parser = argparse.ArgumentParser()
    for name, default in ({"batch": 8, "accumulate": 1} | more).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mended", action="store_true")
    dist.init_process_group("gloo")
    return parser.parse_args()


def samples(count: int) -> torch.Tensor:
    """The whole data, [count, width]."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))


def train(args: argparse.Namespace, batches: Iterable[torch.Tensor]) -> None:
    """A step for each `accumulate` batches of this rank, [b, width]."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    printed = 0
    for number, x in enumerate(batches, 1):
        last = number % args.accumulate == 0
        with nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(x), x.roll(1, dims=1)) / args.accumulate
            loss.backward()
        printed += loss.detach()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(printed)
            if dist.get_rank() == 0:
                print(f"step {number // args.accumulate - 1} loss {printed / dist.get_world_size():.4f}")
            printed = 0
