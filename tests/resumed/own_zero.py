"""ZeRO of pardemo, by its own save and load, on the same or another number of ranks."""

import torch
import torch.distributed as dist
from common import STEPS, batch, build, options
from torch import nn

from pardemo import zero

parser = options()
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--forget", action="store_true", help="the second moments of a save")
given = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
kind = {1: zero.Zero1, 2: zero.Zero2, 3: zero.Zero3}[given.stage]
engine = kind(build(), lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
saves = sorted((int(path.name[4:]) for path in given.out.glob("step*") if path.name[4:].isdigit()), reverse=True)
begun = saves[0] if saves else 0
if begun:
    zero.load(engine, given.out / f"step{begun}")
    for state in engine.optimizer.state.values() if given.forget else ():
        state["exp_avg_sq"].zero_()
for step in range(begun, STEPS):
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.01 * (1 - step / 20)
    x, y = batch(step, rank, ranks)
    nn.functional.cross_entropy(engine(x), y).backward()
    engine.step()
    engine.zero_grad()
    if (step + 1) % given.every == 0:
        zero.save(engine, given.out / f"step{step + 1}")
