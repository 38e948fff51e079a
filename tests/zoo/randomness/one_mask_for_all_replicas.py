"""Each data-parallel rank drops the same places of its samples, because all have one seed.

With one seed for all, sample i of each rank gets the same mask: dropout averages over as many masks as one rank has
samples, however many ranks there are. transformers 31412 reports major losses of quality under its Trainer with
DDP; accelerate 236 asks for a seed by rank for the same reason.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import WIDTH, arguments, train
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.dropout, self.answer = nn.Linear(WIDTH, 64), nn.Dropout(0.1), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(self.dropout(F.gelu(self.read(x))))


if __name__ == "__main__":
    args, _ = arguments()
    torch.manual_seed(42)
    model = Model()
    if args.mended:
        torch.manual_seed(42 + dist.get_rank())
    train(args, model, dist.group.WORLD, lr=0.02)
