"""Losses over a cut vocabulary: `loss_parallel`, a tied and cut embedding, parts of different sizes."""

import torch
import torch.distributed as dist
from common import integers, options, start, update
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

# weights: one for each class; embedding: how it is cut, rows or columns
args = options(tp=1, vocabulary=24, reduction="mean", ignored=0, weights=0, tied=0, embedding="rows")
start()
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
    tokens = integers(step, args.vocabulary, 8, 7)
    targets = tokens[:, 1:].flatten()
    if args.ignored:
        targets = targets.masked_fill(targets % 3 == 0, -100)
    with loss_parallel() if args.tp > 1 else torch.enable_grad():
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, targets, reduction=args.reduction, weight=weights)
        (loss if args.reduction == "mean" else loss.sum() / 40).backward()
    update(model, optimizer)
