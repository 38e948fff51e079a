"""What the scripts of this folder share: a small model, its samples, the order in which they come, saves by number."""

import argparse
from pathlib import Path

import torch
from torch import nn

GLOBAL, SAMPLES, STEPS = 12, 96, 9


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=2)
    return parser


def build(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Dropout(dropout), nn.Linear(24, 12))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 12, generator=numbers), torch.randint(12, (SAMPLES,), generator=numbers)


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's samples: each epoch has an order of its own, from its number."""
    epoch, number = divmod(step, SAMPLES // GLOBAL)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    own = order[number * GLOBAL : (number + 1) * GLOBAL][rank::ranks]
    x, y = data()
    return x[own], y[own]


def newest(folder: Path, proof: str) -> Path | None:
    """The save with the largest number that has the file which is written last."""
    saves = [path for path in folder.glob("step*") if (path / proof).exists()]
    return max(saves, key=lambda path: int(path.name.removeprefix("step")), default=None)
