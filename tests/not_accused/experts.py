"""Two experts, one on each of two ranks under the same name."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

parser = argparse.ArgumentParser()
parser.add_argument("--way", default="one")
args = parser.parse_args()
dist.init_process_group("gloo")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, both = nn.Embedding(16, 8), [nn.Linear(8, 8), nn.Linear(8, 8)]
        self.expert = both[dist.get_rank()]

    def forward(self, tokens):
        return all_reduce(self.expert(self.embed(tokens)))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    out = model(torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step)))
    optimizer.zero_grad()
    (out.square().sum() / 24 / 2).backward()
    dist.all_reduce(model.embed.weight.grad)
    optimizer.step()
