"""FSDP2, saved and loaded by torch.distributed.checkpoint as its documentation does it, also on other ranks."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import STEPS, batch, build, newest, options
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

given = options().parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = build()
for layer in model:
    if next(layer.parameters(), None) is not None:
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def state(step: int) -> dict:
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states, "scheduler": scheduler.state_dict(), "step": step}


begun = 0
if (save := newest(given.out, ".metadata")) is not None:
    read = state(0)
    dcp.load(read, checkpoint_id=save)
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    scheduler.load_state_dict(read["scheduler"])
    begun = read["step"]
for step in range(begun, STEPS):
    x, y = batch(step, rank, ranks)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if (step + 1) % given.every == 0:
        dcp.save(state(step + 1), checkpoint_id=given.out / f"step{step + 1}")
