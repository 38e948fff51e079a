"""Momentum after a resume is that of another rank's shard: the parts of the checkpoint were merged by local index.

With ZeRO-1 each rank keeps the optimizer's state of its own shard and numbers it from 0. Merged into one dictionary,
the last rank's entry wins, and after loading every rank goes on with the last rank's momentum; shards have one size,
so nothing raises. Optimizer states that were silently lost when they were resharded or loaded: AReaL 1468, Fast-LLM
436.
"""

import torch
import torch.distributed as dist
from common import STEPS, Block, LanguageModel, arguments, average_gradients, backward, micro_batches, show
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def resumed(optimizer):
    """The optimizer after its state was saved by all ranks and loaded again."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, optimizer.state_dict())
    merged = parts[dist.get_rank()]
    if not args.mended:
        for part in parts:
            merged["state"].update(part["state"])
    optimizer.load_state_dict(merged)


args = arguments()
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = LanguageModel(Block())
flat = parameters_to_vector(model.parameters()).detach()  # 1896 numbers, shared out evenly
shard = nn.Parameter(flat.chunk(ranks)[rank].clone())
optimizer = torch.optim.SGD([shard], lr=0.1, momentum=0.9)
for step in range(STEPS):
    model.zero_grad()
    total = backward(model, micro_batches(args, step))
    average_gradients(model.parameters())
    shard.grad = parameters_to_vector([p.grad for p in model.parameters()]).chunk(ranks)[rank]
    optimizer.step()
    dist.all_gather(list(flat.chunk(ranks)), shard.detach())
    vector_to_parameters(flat, model.parameters())
    if step == 0:
        resumed(optimizer)
    show(step, total)
