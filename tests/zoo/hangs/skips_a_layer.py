"""A batch without images does not run the vision layers on its rank: under FSDP2 nobody gathers them there.

pytorch/pytorch#152964: FSDP2 takes for granted that all ranks run the same modules; a model whose vision tower runs
only where there are images froze. Mended: a rank without images runs them on a zero, times nothing.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = torch.nn.Linear(16, 32)
        self.text = torch.nn.Linear(16, 32)
        self.head = torch.nn.Linear(32, 4)

    def forward(self, text, image):
        hidden = self.text(text)
        if image is not None:
            hidden = hidden + self.vision(image)
        elif "--mended" in sys.argv:
            hidden = hidden + 0.0 * self.vision(torch.zeros(1, 16))
        return self.head(hidden)


dist.init_process_group("gloo")
model = Model()
for part in (model.vision, model.text, model.head):
    fully_shard(part)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    has_image = dist.get_rank() == 0 or step != 1
    output = model(torch.randn(8, 16), torch.randn(8, 16) if has_image else None)
    optimizer.zero_grad()
    output.square().mean().backward()
    optimizer.step()
