"""The training step calls the module inside DDP instead of DDP, and no gradient is reduced.

DDP gets its reduction ready in its own forward; a call of `ddp.module`, usual for a method such as `compute_loss`,
goes past it. Each rank trains a model of its own, and rank 0's is saved. OpenTSLM trained its curriculum so (OpenTSLM
49), and Intel's domain adapter its two networks (intel/e2eAIOK 197, 198).
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
        self.encoder = nn.Sequential(nn.Embedding(common.VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.decoder = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, common.VOCAB))

    def forward(self, tokens):
        return self.decoder(self.encoder(tokens))


def main():
    args = common.arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(13)
    model = DistributedDataParallel(Model())
    unwrapped = model if args.mended else model.module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(common.STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in common.micro_batches(step, args):
            loss = F.cross_entropy(unwrapped(inputs).transpose(1, 2), targets) / args.accumulate
            loss.backward()
            total += loss.detach()
        optimizer.step()
        common.show(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
