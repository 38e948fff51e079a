"""The gradient in front of a head that is cut is summed in a copy, and the original, not summed, is passed on.

The backward pass calls `all_reduce(gradient.contiguous())` and returns `gradient`: the same memory where the gradient
is contiguous, a copy where the next operation was a transpose. All that lies before the head learns from this rank's
part of the vocabulary only. It was seen in a fused head of SkyRL over Megatron-LM's operator (NovaSky-AI/SkyRL 1886).
"""

import torch
import torch.distributed as dist
from common import VOCAB, WIDTH, LanguageModel, arguments, neighbours, train
from cut_layers import Exchange, cut, join
from torch import nn
from torch.nn import functional as F


def copy_to_cut(x):
    """Gives all parts of a layer the same input; sums the gradient in place, or so it is meant."""

    def reduced(gradient):
        dist.all_reduce(gradient.contiguous(), group=tensor)
        return gradient

    return Exchange.apply(x, torch.clone, reduced)


class Model(LanguageModel):
    """A language model whose head is cut by the vocabulary and wants the sequence first."""

    def __init__(self):
        super().__init__(head=nn.Linear(WIDTH, VOCAB, bias=False))
        self.hidden, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head.weight = cut(self.head.weight, 0, tensor)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + F.gelu(self.hidden(x)))
        turned = lambda x: x.transpose(0, 1).contiguous()  # noqa: E731 - [s, b, w]
        x = copy_to_cut(turned(x)) if args.mended else turned(copy_to_cut(x))
        return join(self.head(x), tensor, dim=2).transpose(0, 1)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(14)
train(args, Model(), group=data)
