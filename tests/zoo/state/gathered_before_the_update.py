"""ZeRO-1 gathers a bucket before its update: the forward pass uses that bucket's weights of the step before.

The updated shards of one bucket are gathered while the next bucket is being updated. Here the gather of the next
bucket is started too early and carries the old shard; the shards themselves are right, so each step the bucket lags
by one. In Megatron-LM 950 buckets were gathered in another order than the forward pass used them: "the weight of the
previous step is still used".
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SAMPLES = 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc2(functional.gelu(self.norm(self.fc1(x))))


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

    def keep(self):
        vector_to_parameters(self.shard.detach(), self.parameters)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=SAMPLES)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    teacher, model = torch.randn(16, 8), Model()
    buckets = [Bucket(module) for module in model.children()]
    optimizer = torch.optim.SGD([bucket.shard for bucket in buckets], lr=0.1, momentum=0.9)

    for step in range(6):
        x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))
        y, total = (x @ teacher).argmax(1), torch.zeros(())
        model.zero_grad()
        for micro in range(args.accumulate):
            first = (rank * args.accumulate + micro) * args.batch
            mine = slice(first, first + args.batch)
            loss = functional.cross_entropy(model(x[mine]), y[mine]) / args.accumulate / ranks
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        for bucket in buckets:
            bucket.take_gradient()
        early = buckets[-1:] if ranks > 1 and not args.mended else []
        for bucket in early:
            bucket.gather()
        optimizer.step()
        for bucket in buckets[: len(buckets) - len(early)]:
            bucket.gather() if ranks > 1 else bucket.keep()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
