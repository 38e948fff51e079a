"""A model whose sequences are cut over context-parallel ranks: queries meet the keys of all parts, in ranks' order."""

import torch
from common import LENGTH, VOCAB, WIDTH, average_gradients, mean_loss, text, train
from cut_layers import gather_to_cut, own_part
from torch import nn
from torch.nn import functional as F

HEADS = 4


class Core(nn.Module):
    """Attention without parameters: softmax(QKᵀ/√d)V where ``allowed`` says which key each query sees."""

    def forward(self, q, k, v, allowed):  # [b, s, heads, d] each
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention of this rank's queries over the keys of the whole sequence."""

    def __init__(self, group, rotary):
        super().__init__()
        self.qkv, self.rotary, self.group = nn.Linear(WIDTH, 3 * WIDTH), rotary, group
        self.core, self.out = Core(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, allowed):
        qk, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).split([2, 1], dim=2)
        q, k = self.rotary(qk).unbind(2)
        k, v = gather_to_cut(k, self.group), gather_to_cut(v.squeeze(2), self.group)
        return self.out(self.core(q, k, v, allowed).flatten(2))


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, group, rotary):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(group, rotary)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, allowed):
        x = x + self.attention(self.norm1(x), allowed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A language model of which each rank sees the part of the sequence that `part` keeps of its axis 1.

    ``rotary`` stands for the table of positions where there is one.
    """

    def __init__(self, group, part=own_part, rotary=None):
        super().__init__()
        self.group, self.positions = group, part(torch.arange(LENGTH)[None], group, 1)[0]
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.position = None if rotary else nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(group, rotary or nn.Identity()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def rows(self):
        """The rows of the table of positions for this rank's tokens."""
        return self.positions

    def allowed(self, tokens):
        """Which key each query sees, [s/c, s]: an earlier one, by the true positions."""
        return self.positions[:, None] >= gather_to_cut(self.positions[None], self.group)[0]

    def hidden(self, tokens):  # [b, s/c] -> [b, s/c, w]
        x = self.token(tokens)
        x = x if self.position is None else x + self.position(self.rows()).expand_as(x)
        allowed = self.allowed(tokens)
        for block in self.blocks:
            x = block(x, allowed)
        return self.norm(x)

    def forward(self, tokens):  # [b, s/c] -> [b, s/c, v]
        return self.head(self.hidden(tokens))


def train_cut(args, model, data, loss_of=mean_loss, *, batch=text, part=own_part, reduce=None):
    """Trains on parts of the sequences of a batch; averages gradients over all ranks, unless `reduce()` is given."""

    def parts(step, samples):
        return [part(whole, model.group, 1) for whole in batch(step, samples)]

    def average():
        average_gradients(model.parameters())

    train(args, model, loss_of, batch=parts, group=data, reduce=reduce or average)
