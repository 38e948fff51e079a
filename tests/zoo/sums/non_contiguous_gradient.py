"""The gradient in front of a head that is cut is summed in a copy, and the original, not summed, is passed on.

The backward pass calls `all_reduce(gradient.contiguous())` and returns `gradient`: the same memory where the gradient
is contiguous, a copy where the next operation was a transpose. All that lies before the head learns from this rank's
part of the vocabulary only. It was seen in a fused head of SkyRL over Megatron-LM's operator (NovaSky-AI/SkyRL 1886).
"""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH = 32


def copy_to_cut(x, group):
    """Gives all parts of a layer the same input; sums the gradient in place, or so it is meant."""

    def reduced(gradient):
        dist.all_reduce(gradient.contiguous(), group=group)
        return gradient

    return common.Exchange.apply(x, torch.clone, reduced)


class Model(nn.Module):
    """A language model whose head is cut by the vocabulary (padded to 24) and wants the sequence first."""

    def __init__(self, tensor, mended):
        super().__init__()
        self.tensor, self.mended = tensor, mended
        self.embed = nn.Embedding(common.VOCAB, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, common.VOCAB + 1, bias=False)
        self.head.weight = common.cut(self.head.weight, 0, tensor)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + F.gelu(self.hidden(x)))
        if self.mended:
            x = copy_to_cut(x.transpose(0, 1).contiguous(), self.tensor)
        else:
            x = copy_to_cut(x, self.tensor).transpose(0, 1).contiguous()  # [s, b, w]
        return common.join(self.head(x), self.tensor, dim=2).transpose(0, 1)


if __name__ == "__main__":
    common.train_cut(14, lambda tensor, args: Model(tensor, args.mended), lambda *_: None, lr=0.02)
