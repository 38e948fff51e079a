"""Under sequence parallelism the gradients of the norms are not summed over the tensor-parallel ranks.

Each rank's norms see its own part of the sequence only, so that their gradients are parts of a sum, although every
rank holds the whole weight. Megatron-LM 1446 shows `final_layernorm` with another gradient on each of four ranks. In
gpt-neox's first version (1257, 1259) the hook that should sum them was registered before DeepSpeed set the model up,
and took a mean.
"""

import common
from torch import nn
from torch.nn import functional as F

WIDTH = 32


class Block(nn.Module):
    """x + fc2(gelu(fc1(norm(x)))): fc1 is cut by columns, fc2 by rows; x is this rank's part of the sequence."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor = tensor
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.fc1.weight, self.fc1.bias = common.cut(self.fc1.weight, 0, tensor), common.cut(self.fc1.bias, 0, tensor)
        self.fc2.weight = common.cut(self.fc2.weight, 1, tensor)

    def forward(self, x):
        hidden = F.gelu(self.fc1(common.gather_to_cut(self.norm(x), self.tensor)))  # [b, s, 4w/t]
        return x + common.scatter_of_cut(self.fc2(hidden), self.tensor)  # [b, s/t, w]


class Model(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.tensor = tensor
        self.embed = nn.Embedding(common.VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(tensor) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, common.VOCAB)

    def forward(self, tokens):
        x = common.split(self.embed(tokens), self.tensor)
        for block in self.blocks:
            x = block(x)
        return self.head(common.join(self.norm(x), self.tensor))


def own_sums(model, tensor, args):
    if args.mended:
        norms = [p for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()]
        common.sum_gradients(norms, tensor)


if __name__ == "__main__":
    common.train_cut(1, lambda tensor, args: Model(tensor), own_sums)
