"""Tensor-parallel ranks start from one seed, so that each draws the same values for its own shard.

Two halves of a matrix are then equal, and stay equal: neurons come twice, attention heads come twice, and the model
has half the capacity that was paid for. The loss falls all the same, a little above where it should be. SmolLM3 was
trained for a trillion tokens before this was found (the smol training playbook); ms-swift 7944 and InternLM 405
mended the same.
"""

import zlib

import torch
from common import LanguageModel, arguments, neighbours, train
from cut_layers import Block, ColumnLinear, RowLinear, own_part


@torch.no_grad()
def initialise(layer, seed):
    """Draws a cut layer's weight, which is cut along its outputs (dim 0) or its inputs (dim 1)."""
    generator, dim = torch.Generator().manual_seed(seed), 0 if isinstance(layer, ColumnLinear) else 1
    if args.mended:  # all values are drawn and this rank keeps its own, so that a layout does not change them
        shape = [n * args.tp if i == dim else n for i, n in enumerate(layer.weight.shape)]
        layer.weight.copy_(own_part(torch.randn(shape, generator=generator), tensor, dim) / 4)
    else:
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / 4)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(0)
model = LanguageModel(Block(tensor), Block(tensor))
for name, layer in model.named_modules():
    if isinstance(layer, ColumnLinear | RowLinear):
        initialise(layer, zlib.crc32(name.encode()))
train(args, model, group=data)
