"""Under sequence parallelism a row-parallel layer's bias meets a part of the sequence; its gradients stay parts.

The output of attention is summed and split along the sequence, and the bias comes after it (rightly: once). So each
rank's gradient of the bias is of its own positions only. Megatron-LM sums it later with those of the norms (asked in
its 236); the first version of that in Slapo did not (awslabs/slapo 23: "linear2.bias.grad is 1/TP of the original
one").
"""

import torch
import torch.distributed as dist
from common import WIDTH, LanguageModel, arguments, average_gradients, neighbours, sum_gradients, train
from cut_layers import cut, gather_to_cut, join, scatter_of_cut, split
from torch import nn
from torch.nn import functional as F

HEADS = 4


class Attention(nn.Module):
    """Causal attention whose heads are cut over the ranks; in and out goes this rank's part of the sequence."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        for layer in (self.query, self.key, self.value):
            layer.weight = cut(layer.weight, 0, tensor)
        self.out.weight = cut(self.out.weight, 1, tensor)

    def forward(self, x):
        x, heads = gather_to_cut(x, tensor), HEADS // dist.get_world_size(tensor)  # [b, s, w]
        q, k, v = (f(x).unflatten(-1, (heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)  # [b, s, w/t]
        return scatter_of_cut(F.linear(mixed, self.out.weight), tensor) + self.out.bias  # [b, s/t, w]


class Model(LanguageModel):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attentions = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens):
        x = split(self.embed(tokens), tensor)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        return self.head(join(x, tensor))


def reduce():
    sum_gradients(model.norms.parameters(), tensor)
    if args.mended:
        sum_gradients([attention.out.bias for attention in model.attentions], tensor)
    average_gradients(model.parameters(), data)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(3)
model = Model()
train(args, model, group=data, reduce=reduce)
