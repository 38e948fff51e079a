"""FSDP2, saved and loaded by torch.distributed.checkpoint as its documentation does it, also on other ranks.

Generators are no part of what is saved there; ``--generators`` saves each rank's, too.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import STEPS, batches, build, newest, options
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

parser = options()
parser.add_argument("--generators", action="store_true")
given = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = build()
for layer in model:
    if next(layer.parameters(), None) is not None:
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
torch.manual_seed(3 + rank)


def state(step: int) -> dict:
    weights, states = get_state_dict(model, optimizer)
    made = {"model": weights, "optimizer": states, "scheduler": scheduler.state_dict(), "step": step, "ranks": ranks}
    if given.generators:  # under a name of this rank's: of equal names one rank's value would be written
        made[f"generator {rank}"] = torch.get_rng_state()
    return made


begun = 0
if (save := newest(given.out, ".metadata")) is not None:
    read = state(0)
    before = {"ranks": 0}
    dcp.load(before, checkpoint_id=save)
    same = before["ranks"] == ranks
    if not same:  # where each rank was says nothing about others
        read.pop(f"generator {rank}", None)
    dcp.load(read, checkpoint_id=save)
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    scheduler.load_state_dict(read["scheduler"])
    begun = read["step"]
    if given.generators and same:
        torch.set_rng_state(read[f"generator {rank}"])
    elif given.generators:
        torch.manual_seed(1000 * begun + rank)
for step, (x, y) in zip(range(begun, STEPS), batches(begun, rank, ranks), strict=False):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if (step + 1) % given.every == 0:
        dcp.save(state(step + 1), checkpoint_id=given.out / f"step{step + 1}")
