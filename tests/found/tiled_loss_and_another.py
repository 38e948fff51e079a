"""sequence_tiled_compute divides in place, and so divides the gradient of another loss, too (deepspeed 0.19.8)."""

import argparse

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--tiles", type=int, default=4)
parser.add_argument("--reduction", default="mean")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(hidden, labels):
    logits = F.linear(hidden, model[1].weight).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction=args.reduction) / (64 if args.reduction == "sum" else 1)


for step in range(3):
    samples = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(1 + step))
    hidden, labels = model[0](samples), samples.argmax(-1)
    another = hidden.square().mean()
    cut = {"hidden": hidden, "labels": labels}
    loss = sequence_tiled_compute(loss_of, 8, args.tiles, cut, {}, "hidden", [model[1].weight], 0, args.reduction)
    (loss + another).backward()
    print(f"step {step} loss {loss + another:.6f} norm of the first gradient {model[0].weight.grad.norm():.6f}")
    optimizer.step()
    optimizer.zero_grad()
