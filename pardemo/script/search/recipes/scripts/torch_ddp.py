"""DistributedDataParallel: hooks on its buckets, Join, ZeroRedundancyOptimizer."""

import contextlib

import torch
from common import options, start
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

args = options(way="", accumulate=1)  # way: view, static, unused, join, hook, power, zero, groups
way, (ranks, rank) = args.way, start()
torch.manual_seed(0)
bare = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 17), nn.LayerNorm(17), nn.Linear(17, 5))
model = bare
if ranks > 1:
    model = DistributedDataParallel(
        bare, bucket_cap_mb=0.001, gradient_as_bucket_view="view" in way, static_graph="static" in way,
        find_unused_parameters="unused" in way,
    )  # fmt: skip
settings = [
    {"params": list(bare[:2].parameters()), "lr": 0.02},
    {"params": list(bare[2:].parameters()), "weight_decay": 0.0},
]
parameters = settings if "groups" in way else bare.parameters()
if ranks > 1 and "zero" in way:
    optimizer = ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.AdamW, lr=0.01, parameters_as_bucket_view="view" in way
    )
else:
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
if ranks > 1 and "hook" in way:
    model.register_comm_hook(None, default_hooks.allreduce_hook)
if ranks > 1 and "power" in way:  # until its first steps are over it is an all-reduce
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=9), powerSGD_hook.powerSGD_hook)
with Join([model]) if ranks > 1 and "join" in way else contextlib.nullcontext():
    for step in range(3):
        batch = torch.randn(24, 9, generator=torch.Generator().manual_seed(step))
        parts = batch.chunk(args.accumulate)
        for number, part in enumerate(parts, 1):
            late = ranks > 1 and number < args.accumulate
            with model.no_sync() if late else contextlib.nullcontext():
                loss = F.mse_loss(model(part.chunk(ranks)[rank]), part.chunk(ranks)[rank][:, :5])
                (loss / args.accumulate).backward()
        optimizer.step(), optimizer.zero_grad()
