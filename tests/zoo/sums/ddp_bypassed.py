"""The training step calls the module inside DDP instead of DDP, and no gradient is reduced.

DDP gets its reduction ready in its own forward; a call of `ddp.module`, usual for a method such as `compute_loss`,
goes past it. Each rank trains a model of its own, and rank 0's is saved. OpenTSLM trained its curriculum so (OpenTSLM
49), and Intel's domain adapter its two networks (intel/e2eAIOK 197, 198).
"""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(common.VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.decoder = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, common.VOCAB))

    def forward(self, tokens):
        return self.decoder(self.encoder(tokens))


if __name__ == "__main__":
    args = common.arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(13)
    ddp = DistributedDataParallel(Model())
    common.train(args, ddp if args.mended else ddp.module, ddp.parameters(), lambda: None, lr=0.02)
