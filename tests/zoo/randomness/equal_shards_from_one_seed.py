"""Tensor-parallel ranks start from one seed, so that each draws the same values for its own shard.

Two halves of a matrix are then equal, and stay equal: neurons come twice, attention heads come twice, and the model
has half the capacity that was paid for. The loss falls all the same, a little above where it should be. SmolLM3 was
trained for a trillion tokens before this was found (the smol training playbook); ms-swift 7944 and InternLM 405
mended the same.
"""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import WIDTH, CopyIn, SumOut, arguments, train
from torch import nn


class Linear(nn.Module):
    """A linear layer without bias, cut along `axis` (0: outputs, 1: inputs) of its weight."""

    def __init__(self, shape: tuple[int, int], axis: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        size = dist.get_world_size(group)
        shape = tuple(n // size if i == axis else n for i, n in enumerate(shape))
        self.weight, self.axis, self.group = nn.Parameter(torch.empty(shape)), axis, group

    def initialise(self, seed: int, mended: bool) -> None:
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        generator = torch.Generator().manual_seed(seed)
        if mended:  # all values are drawn and this rank keeps its own, so that a layout does not change them
            shape = tuple(n * size if i == self.axis else n for i, n in enumerate(self.weight.shape))
            self.weight.data = torch.randn(shape, generator=generator).chunk(size, self.axis)[rank].clone() / 4
        else:
            self.weight.data = torch.randn(self.weight.shape, generator=generator) / 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.axis == 0:
            return F.linear(CopyIn.apply(x, self.group), self.weight)
        return SumOut.apply(F.linear(x, self.weight), self.group)


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = Linear((4 * WIDTH, WIDTH), 0, group), Linear((WIDTH, 4 * WIDTH), 1, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


if __name__ == "__main__":
    args, mesh = arguments()
    tp = mesh.get_group("tp")
    model = nn.Sequential()
    model.add_module("first", Block(tp))
    model.add_module("second", Block(tp))
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            layer.initialise(zlib.crc32(name.encode()), args.mended)
    train(args, model, mesh.get_group("dp"), lr=0.01)
