"""A layer that is called once for each tile of the tokens, as one does to save memory."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--tiles", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        return self.head(torch.cat([self.layer(tile) for tile in x.chunk(args.tiles)]).view(*tokens.shape, -1))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
