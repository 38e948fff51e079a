"""The first and the last stage of a pipeline share a table of embeddings, and neither gets the other's gradient.

The first stage has the gradient of the embedding, the last that of the head; the table's own is their sum. Without it
the two are different tables after one step. Cornstarch's pipelines began so (cornstarch-org/Cornstarch 16), and
Piper's (uw-syfi/piper 13); in Megatron-LM the sum was taken of parts that did not belong together (844).
"""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(x)))


class Stage(nn.Module):
    """The whole model, of which a stage of the pipeline keeps its part; the head and the embedding share a table."""

    def __init__(self, place, stages):
        super().__init__()
        self.embed = nn.Embedding(common.VOCAB, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, common.VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        self.tied = [self.embed.weight]
        self.first, self.last = place == 0, place == stages - 1
        if not self.first:
            del self.embed
        for i in range(2):
            if i * stages // 2 != place:
                del self.blocks[str(i)]
        if not self.last:
            del self.norm, self.head

    def forward(self, x):
        if self.first:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def main():
    args = common.arguments(pp=1)
    dist.init_process_group("gloo")
    pipeline, data = common.neighbours(args.pp)
    torch.manual_seed(7)
    stage = Stage(dist.get_rank(pipeline), args.pp)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    for step in range(common.STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in common.micro_batches(step, args, data):
            total += common.through_stage(stage, inputs, targets, stage.first, stage.last, WIDTH, 1 / args.accumulate)
        if args.mended:
            common.sum_gradients(stage.tied, pipeline)
        common.sum_gradients(stage.parameters(), data, divide_by=dist.get_world_size(data))
        optimizer.step()
        common.show(step, total, ranks=dist.get_world_size(data))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
