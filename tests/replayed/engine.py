"""The model of decoder.py in another engine's form: query, key and value in one matrix, and tokens before samples.

--wrong mask: from the second layer on a token sees the next one, too. --wrong temperature: logits are divided by 0.7,
as in an engine that samples (vime 64). --wrong weights: another seed's.
"""

import argparse

import torch
from decoder import HEADS, WIDTH, trained
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, layer, ahead):
        super().__init__()
        self.linear_qkv, self.linear_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), layer.o
        self.linear_qkv.weight.data = torch.cat([layer.q.weight, layer.k.weight, layer.v.weight]).detach()
        self.input_layernorm, self.linear_fc1, self.linear_fc2, self.ahead = layer.norm, layer.up, layer.down, ahead

    def forward(self, x):  # [s, b, h]
        heads = self.linear_qkv(self.input_layernorm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for part in heads)  # [b, n, s, d]
        sees = torch.ones(len(x), len(x), dtype=torch.bool).tril(self.ahead)
        x = x + self.linear_proj(F.scaled_dot_product_attention(q, k, v, sees).permute(2, 0, 1, 3).flatten(2))
        return x + self.linear_fc2(F.silu(self.linear_fc1(x)))


class Engine(nn.Module):
    def __init__(self, model, wrong):
        super().__init__()
        self.word, self.position, self.output = model.embed, model.places, model.head
        ahead = [int(wrong == "mask" and number > 0) for number in range(3)]
        self.blocks = nn.ModuleList(map(Block, model.layers, ahead))
        self.temperature = 0.7 if wrong == "temperature" else 1.0

    def forward(self, tokens):
        x = (self.word(tokens) + self.position.weight[: tokens.shape[1]]).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.output(x) / self.temperature  # [s, b, v]


parser = argparse.ArgumentParser()
parser.add_argument("samples")
parser.add_argument("--wrong", default="")
args = parser.parse_args()
model = Engine(trained(1 if args.wrong == "weights" else 0), args.wrong)
with torch.inference_mode():
    model(load_file(args.samples)["argument0"])
