"""Under sequence parallelism the gradients of the norms are not summed over the tensor-parallel ranks.

Each rank's norms see its own part of the sequence only, so that their gradients are parts of a sum, although every
rank holds the whole weight. Megatron-LM 1446 shows `final_layernorm` with another gradient on each of four ranks. In
gpt-neox's first version (1257, 1259) the hook that should sum them was registered before DeepSpeed set the model up,
and took a mean.
"""

import torch
from common import WIDTH, LanguageModel, arguments, average_gradients, neighbours, sum_gradients, train
from cut_layers import cut, gather_to_cut, join, scatter_of_cut, split
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """x + fc2(gelu(fc1(norm(x)))): fc1 is cut by columns, fc2 by rows; x is this rank's part of the sequence."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.fc1.weight, self.fc1.bias = cut(self.fc1.weight, 0, tensor), cut(self.fc1.bias, 0, tensor)
        self.fc2.weight = cut(self.fc2.weight, 1, tensor)

    def forward(self, x):
        hidden = F.gelu(self.fc1(gather_to_cut(self.norm(x), tensor)))  # [b, s, 4w/t]
        return x + scatter_of_cut(self.fc2(hidden), tensor)  # [b, s/t, w]


class Model(LanguageModel):
    def __init__(self):
        super().__init__(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = split(self.embed(tokens), tensor)
        for block in self.blocks:
            x = block(x)
        return self.head(join(self.norm(x), tensor))


def reduce():
    if args.mended:
        norms = [p for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()]
        sum_gradients(norms, tensor)
    average_gradients(model.parameters(), data)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(1)
model = Model()
train(args, model, group=data, reduce=reduce)
