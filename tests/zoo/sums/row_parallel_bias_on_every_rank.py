"""The bias of a row-parallel layer is added on each tensor-parallel rank, before the ranks' outputs are summed.

So the sum has the bias once for each rank, and the layer's output is wrong in the forward pass already. It happened
in Slapo, which trains (awslabs/slapo 10), and in engines that serve models (text-generation-inference 1036,
Wenyueh/MinivLLM 80).
"""

import common
from torch import nn
from torch.nn import functional as F

WIDTH = 32


class RowLinear(nn.Linear):
    """A linear layer whose weight is cut along its inputs; each rank has its part of the input and the whole output."""

    def __init__(self, inputs, outputs, tensor, mended):
        super().__init__(inputs, outputs)
        self.tensor, self.mended = tensor, mended
        self.weight = common.cut(self.weight, 1, tensor)

    def forward(self, x):
        if self.mended:
            return common.sum_of_cut(F.linear(x, self.weight), self.tensor) + self.bias
        return common.sum_of_cut(F.linear(x, self.weight, self.bias), self.tensor)


class Block(nn.Module):
    def __init__(self, tensor, mended):
        super().__init__()
        self.tensor = tensor
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc1.weight, self.fc1.bias = common.cut(self.fc1.weight, 0, tensor), common.cut(self.fc1.bias, 0, tensor)
        self.fc2 = RowLinear(4 * WIDTH, WIDTH, tensor, mended)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(common.copy_to_cut(self.norm(x), self.tensor))))


class Model(nn.Module):
    def __init__(self, tensor, mended):
        super().__init__()
        self.embed = nn.Embedding(common.VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(tensor, mended) for _ in range(2))
        self.head = nn.Linear(WIDTH, common.VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


if __name__ == "__main__":
    common.train_cut(2, lambda tensor, args: Model(tensor, args.mended), lambda *_: None)
