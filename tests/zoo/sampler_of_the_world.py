"""Ranks of one tensor-parallel group get different samples, because the sampler asks for the rank in the whole world.

A DistributedSampler without `num_replicas` and `rank` counts all processes. Ranks that compute one model together
have to see the same samples: what they sum over their shards is otherwise the answer to no sample at all.
DeepSpeed's loader did so with model parallelism until its 99 was closed; accelerate 3092 is the same with ranks
that share a data-parallel index.
"""

import torch
import torch.distributed as dist
from common import LanguageModel, arguments, average_gradients, backward, neighbours, show, text
from cut_layers import Block
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

args = arguments(tp=1)
tensor, replicas = neighbours(args.tp)
torch.manual_seed(0)
data, model = TensorDataset(*text(0, 192)), LanguageModel(Block(tensor))
place = {"num_replicas": dist.get_world_size(replicas), "rank": dist.get_rank(replicas)} if args.mended else {}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for step, micro_batch in enumerate(DataLoader(data, args.batch, sampler=DistributedSampler(data, **place))):
    printed = backward(model, [micro_batch])
    average_gradients(model.parameters(), replicas)
    optimizer.step()
    optimizer.zero_grad()
    show(step, printed)
