"""ZeRO of pardemo, by its own save and load, on the same or another number of ranks.

``zero.save`` writes the engine. What is the script's own (the scheduler, each rank's generator) it saves beside.
"""

import torch
import torch.distributed as dist
from common import STEPS, batches, build, options
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
scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda number: 1 - number / 20)
torch.manual_seed(3 + rank)
saves = sorted((int(path.name[4:]) for path in given.out.glob("step*") if path.name[4:].isdigit()), reverse=True)
begun = saves[0] if saves else 0
if begun:
    zero.load(engine, given.out / f"step{begun}")
    for state in engine.optimizer.state.values() if given.forget else ():
        state["exp_avg_sq"].zero_()
    beside = torch.load(given.out / f"beside{begun}.pt", weights_only=True)
    scheduler.load_state_dict(beside["scheduler"])
    if len(beside["generators"]) == ranks:
        torch.set_rng_state(beside["generators"][rank])
    else:  # where each rank was says nothing about others
        torch.manual_seed(1000 * begun + rank)
for step, (x, y) in zip(range(begun, STEPS), batches(begun, rank, ranks), strict=False):
    nn.functional.cross_entropy(engine(x), y).backward()
    engine.step()
    engine.zero_grad()
    scheduler.step()
    if (step + 1) % given.every == 0:
        generators = [torch.empty_like(torch.get_rng_state()) for _ in range(ranks)]
        dist.all_gather(generators, torch.get_rng_state())
        if rank == 0:  # before the folder has its name, by which a save is known as whole
            state = {"scheduler": scheduler.state_dict(), "generators": generators}
            torch.save(state, given.out / f"beside{step + 1}.pt")
        zero.save(engine, given.out / f"step{step + 1}")
