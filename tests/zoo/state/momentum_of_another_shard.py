"""Momentum after a resume is that of another rank's shard: the parts of the checkpoint were merged by local index.

With ZeRO-1 each rank keeps the optimizer's state of its own shard and numbers it from 0. Merged into one dictionary,
the last rank's entry wins, and after loading every rank goes on with the last rank's momentum; shards have one size,
so nothing raises. Optimizer states that were silently lost when they were resharded or loaded: AReaL 1468, Fast-LLM
436.
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


def resumed(optimizer, mended):
    """The optimizer after its state was saved by all ranks and loaded again."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, optimizer.state_dict())
    merged = parts[dist.get_rank()]
    if not mended:
        for part in parts:
            merged["state"].update(part["state"])
    optimizer.load_state_dict(merged)


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
    flat = parameters_to_vector(model.parameters()).detach()  # 872 numbers, shared out evenly
    shard = nn.Parameter(flat.chunk(ranks)[rank].clone())
    optimizer = torch.optim.SGD([shard], lr=0.1, momentum=0.9)

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
        shard.grad = parameters_to_vector([p.grad for p in model.parameters()]).chunk(ranks)[rank]
        optimizer.step()
        dist.all_gather(list(flat.chunk(ranks)), shard.detach())
        vector_to_parameters(flat, model.parameters())
        if step == 0:
            resumed(optimizer, args.mended)
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
