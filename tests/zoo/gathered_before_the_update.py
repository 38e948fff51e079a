"""ZeRO-1 gathers a bucket before its update: the forward pass uses that bucket's weights of the step before.

The updated shards of one bucket are gathered while the next bucket is being updated. Here the gather of the next
bucket is started too early and carries the old shard; the shards themselves are right, so each step the bucket lags
by one. In Megatron-LM 950 buckets were gathered in another order than the forward pass used them: "the weight of the
previous step is still used".
"""

import torch
import torch.distributed as dist
from common import STEPS, Block, LanguageModel, arguments, average_gradients, backward, micro_batches, show
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Bucket:
    """The parameters of a module as one vector, of which each rank updates a shard with an optimizer of its own."""

    def __init__(self, module):
        self.parameters, self.rank, self.ranks = list(module.parameters()), dist.get_rank(), dist.get_world_size()
        self.whole = parameters_to_vector(self.parameters).detach()
        self.shard = nn.Parameter(self.whole.chunk(self.ranks)[self.rank].clone())

    def take_gradient(self):
        gradient = parameters_to_vector([p.grad for p in self.parameters])
        self.shard.grad = gradient.chunk(self.ranks)[self.rank]

    def gather(self):
        dist.all_gather(list(self.whole.chunk(self.ranks)), self.shard.detach())
        vector_to_parameters(self.whole, self.parameters)


args = arguments()
torch.manual_seed(0)
model = LanguageModel(Block())
buckets = [Bucket(module) for module in model.children()]
optimizer = torch.optim.SGD([bucket.shard for bucket in buckets], lr=0.1, momentum=0.9)
for step in range(STEPS):
    model.zero_grad()
    total = backward(model, micro_batches(args, step))
    average_gradients(model.parameters())
    for bucket in buckets:
        bucket.take_gradient()
    early = buckets[-1:] if dist.get_world_size() > 1 and not args.mended else []
    for bucket in early:
        bucket.gather()
    optimizer.step()
    for bucket in buckets[: len(buckets) - len(early)]:
        bucket.gather()
    show(step, total)
