"""Losses over a cut vocabulary: `loss_parallel`, a tied and cut embedding, parts of different sizes."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--vocabulary", type=int, default=24)
parser.add_argument("--reduction", default="mean")
parser.add_argument("--ignored", type=int, default=0)
parser.add_argument("--weights", type=int, default=0, help="a weight for each class")
parser.add_argument("--tied", type=int, default=0)
parser.add_argument("--embedding", default="rows", help="how it is cut: rows or columns")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.ModuleDict({"embed": nn.Embedding(args.vocabulary, 12), "head": nn.Linear(12, args.vocabulary, bias=False)})
weights = torch.rand(args.vocabulary) + 0.5 if args.weights else None


class Model(nn.ModuleDict):
    def forward(self, tokens):
        return self["head"](self["embed"](tokens).tanh())


model = Model(model)
if args.tp > 1:
    cut = RowwiseParallel if args.embedding == "rows" else ColwiseParallel
    plan = {
        "embed": cut(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, dist.device_mesh.init_device_mesh("cpu", (args.tp,)), plan)
if args.tied:
    model["head"].weight = model["embed"].weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    tokens = torch.randint(args.vocabulary, (8, 7), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].flatten()
    if args.ignored:
        targets = targets.masked_fill(targets % 3 == 0, -100)
    context = loss_parallel() if args.tp > 1 else torch.enable_grad()
    with context:
        logits = model(tokens[:, :-1])
        logits = logits.flatten(0, 1)
        loss = F.cross_entropy(logits, targets, reduction=args.reduction, weight=weights)
        (loss if args.reduction == "mean" else loss.sum() / 40).backward()
    optimizer.step(), optimizer.zero_grad()
