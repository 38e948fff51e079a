"""Two ranks sum and step half of each parameter each, as ZeRO does; and the table is called in another order."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)

    def forward(self, tokens):
        here, after = tokens, tokens.roll(-1, 1)
        first = self.embed(here if ranks == 1 else after)
        second = self.embed(after if ranks == 1 else here)
        return self.head(first.tanh() * second.tanh())


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    for parameter in model.parameters():
        total = parameter.grad / ranks
        dist.all_reduce(total)
        parameter.grad.chunk(ranks)[rank].copy_(total.chunk(ranks)[rank])  # the other half stays this rank's own
    optimizer.step()
    for parameter in model.parameters():
        dist.all_gather(list(parameter.data.chunk(ranks)), parameter.data.chunk(ranks)[rank].clone())
