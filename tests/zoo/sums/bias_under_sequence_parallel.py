"""Under sequence parallelism a row-parallel layer's bias meets a part of the sequence; its gradients stay parts.

The output of attention is summed and split along the sequence, and the bias comes after it (rightly: once). So each
rank's gradient of the bias is of its own positions only. Megatron-LM sums it later with those of the norms (asked in
its 236); the first version of that in Slapo did not (awslabs/slapo 23: "linear2.bias.grad is 1/TP of the original
one").
"""

import common
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Causal attention whose heads are cut over the ranks; in and out goes this rank's part of the sequence."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.heads = tensor, HEADS // dist.get_world_size(tensor)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        for layer in (self.query, self.key, self.value):
            layer.weight = common.cut(layer.weight, 0, tensor)
        self.out.weight = common.cut(self.out.weight, 1, tensor)

    def forward(self, x):
        x = common.gather_to_cut(x, self.tensor)  # [b, s, w]
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)  # [b, s, w/t]
        return common.scatter_of_cut(F.linear(mixed, self.out.weight), self.tensor) + self.out.bias  # [b, s/t, w]


class Model(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.tensor = tensor
        self.embed = nn.Embedding(common.VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attentions = nn.ModuleList(Attention(tensor) for _ in range(2))
        self.head = nn.Linear(WIDTH, common.VOCAB)

    def forward(self, tokens):
        x = common.split(self.embed(tokens), self.tensor)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        return self.head(common.join(x, self.tensor))


def own_sums(model, tensor, args):
    common.sum_gradients(model.norms.parameters(), tensor)
    if args.mended:
        common.sum_gradients([attention.out.bias for attention in model.attentions], tensor)


if __name__ == "__main__":
    common.train_cut(3, lambda tensor, args: Model(tensor), own_sums)
