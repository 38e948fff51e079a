"""LoRA under tensor parallelism: the half of each adapter that all ranks hold gets a part of its gradient on each.

Of a layer cut by columns it is A (B is cut with the columns), of one cut by rows it is B (A is cut with the rows).
Where nothing sums them, each rank trains another adapter, and rank 0's is the one that is saved: ISEEKYAN/Megatron-LM
131, for experts' adapters. Under sequence parallelism the same halves see a part of the sequence:
modelscope/mcore-bridge 173, where a saved adapter was zero.
"""

import common
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, RANK = 32, 4


class Adapted(nn.Module):
    """A frozen weight, cut along `dim` (0: columns, 1: rows), and an adapter B A of which one half is cut with it."""

    def __init__(self, inputs, outputs, dim, tensor):
        super().__init__()
        weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        a, b = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5), nn.Parameter(torch.randn(outputs, RANK) / 10)
        self.weight = common.cut(weight, dim, tensor)
        self.lora_a = a if dim == 0 else common.cut(a, 1, tensor)
        self.lora_b = common.cut(b, 0, tensor) if dim == 0 else b
        self.dim, self.tensor = dim, tensor

    def forward(self, x):
        if self.dim == 0:
            x = common.copy_to_cut(x, self.tensor)
        y = F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_a), self.lora_b)
        return y if self.dim == 0 else common.sum_of_cut(y, self.tensor)


class Model(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.embed = nn.Embedding(common.VOCAB, WIDTH).requires_grad_(False)
        self.up = Adapted(WIDTH, 4 * WIDTH, 0, tensor)
        self.down = Adapted(4 * WIDTH, WIDTH, 1, tensor)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, common.VOCAB).requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


def own_sums(model, tensor, args):
    if args.mended:
        common.sum_gradients([model.up.lora_a, model.down.lora_b], tensor)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


if __name__ == "__main__":
    common.train_cut(9, lambda tensor, args: Model(tensor), own_sums, trained, lr=0.02)
