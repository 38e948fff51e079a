"""What the scripts of this folder share: a small model, its samples, the loader that brings them, saves by number."""

import argparse
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

#: Six steps are an epoch: a run that goes on behind step 4 begins within one, and comes to the next.
GLOBAL, SAMPLES, STEPS = 12, 72, 9
DROPOUT = 0.1


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=2)
    return parser


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Dropout(DROPOUT), nn.Linear(24, 12))


def data() -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 12, generator=numbers), torch.randint(12, (SAMPLES,), generator=numbers))


def batches(begun: int, rank: int, ranks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches from a step on, as torch's documentation has it: a sampler that knows the epoch's number.

    The loader has a generator of its own: of torch's, from which dropout draws, it would take a number at each epoch's
    begin, also where a run that goes on begins one anew.
    """
    samples = data()
    sampler = DistributedSampler(samples, ranks, rank)
    loader = DataLoader(samples, GLOBAL // ranks, sampler=sampler, generator=torch.Generator())
    first, skipped = divmod(begun, len(loader))
    for epoch in count(first):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if epoch > first or number >= skipped:
                yield batch


def newest(folder: Path, proof: str) -> Path | None:
    """The save with the largest number that has the file which is written last."""
    saves = [path for path in folder.glob("step*") if (path / proof).exists()]
    return max(saves, key=lambda path: int(path.name.removeprefix("step")), default=None)
