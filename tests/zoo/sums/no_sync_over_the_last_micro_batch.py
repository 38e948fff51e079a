"""DDP reduces gradients in the first micro-batch of a step, and not in the last.

The first micro-batch's gradients become a mean over the ranks, and what the others add stays on its rank. FunASR's
trainer asked `batch_idx % accum_grad` where `(batch_idx + 1) % accum_grad` was meant (modelscope/FunASR 3472);
without accumulation the two are the same.
"""

import contextlib

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(common.VOCAB, WIDTH)
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, common.VOCAB)

    def forward(self, tokens):
        return self.head(torch.relu(self.hidden(self.embed(tokens))))


def main():
    args = common.arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(common.STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, (inputs, targets) in enumerate(common.micro_batches(step, args)):
            synchronize = (index + 1 if args.mended else index) % args.accumulate == 0
            with contextlib.nullcontext() if synchronize else model.no_sync():
                loss = F.cross_entropy(model(inputs).transpose(1, 2), targets) / args.accumulate
                loss.backward()
            total += loss.detach()
        optimizer.step()
        common.show(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
