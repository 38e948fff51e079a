"""LoRA under tensor parallelism: the half of each adapter that all ranks hold gets a part of its gradient on each.

Of a layer cut by columns it is A (B is cut with the columns), of one cut by rows it is B (A is cut with the rows).
Where nothing sums them, each rank trains another adapter, and rank 0's is the one that is saved: ISEEKYAN/Megatron-LM
131, for experts' adapters. Under sequence parallelism the same halves see a part of the sequence:
modelscope/mcore-bridge 173, where a saved adapter was zero.
"""

import torch
from common import WIDTH, LanguageModel, arguments, average_gradients, neighbours, sum_gradients, train
from cut_layers import copy_to_cut, cut, sum_of_cut
from torch import nn
from torch.nn import functional as F

RANK = 4


class Adapted(nn.Module):
    """A frozen weight, cut along `dim` (0: columns, 1: rows), and an adapter B A of which one half is cut with it."""

    def __init__(self, inputs, outputs, dim):
        super().__init__()
        weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        a, b = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5), nn.Parameter(torch.randn(outputs, RANK) / 10)
        self.dim, self.weight = dim, cut(weight, dim, tensor)
        self.lora_a = a if dim == 0 else cut(a, 1, tensor)
        self.lora_b = cut(b, 0, tensor) if dim == 0 else b

    def forward(self, x):
        if self.dim == 0:
            x = copy_to_cut(x, tensor)
        y = F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_a), self.lora_b)
        return y if self.dim == 0 else sum_of_cut(y, tensor)


class Model(LanguageModel):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.up, self.down = Adapted(WIDTH, 4 * WIDTH, 0), Adapted(4 * WIDTH, WIDTH, 1)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def reduce():
    if args.mended:
        sum_gradients([model.up.lora_a, model.down.lora_b], tensor)
    average_gradients(model.parameters(), data)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(9)
model = Model()
train(args, model, group=data, reduce=reduce)
