"""The backbone is unfrozen after DDP was built, which reduces only what was trained when it was built.

DDP's documentation warns of it ("gradient reduction functions no longer match the correct set of parameters"), and
nothing raises: each rank goes on with a backbone of its own, trained on its own samples. So it is with Lightning's
BackboneFinetuning (Lightning-AI/pytorch-lightning 20340): the validation loss fell on rank 0 and rose on the others.
Mended, DDP is built anew.
"""

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
        self.backbone = nn.Sequential(nn.Embedding(common.VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, common.VOCAB)

    def forward(self, tokens):
        return self.head(self.backbone(tokens))


def main():
    args = common.arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(10)
    model = Model()
    model.backbone.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(common.STEPS):
        if step == 1:
            model.backbone.requires_grad_(True)
            if args.mended:
                ddp = DistributedDataParallel(model)
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in common.micro_batches(step, args):
            loss = F.cross_entropy(ddp(inputs).transpose(1, 2), targets) / args.accumulate
            loss.backward()
            total += loss.detach()
        optimizer.step()
        common.show(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
