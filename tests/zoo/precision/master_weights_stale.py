"""Master weights are stale: the working weights are replaced after the optimizer copied them, and it is not told.

A mixed-precision optimizer updates fp32 copies and writes them over the model's bf16 weights. Here the ranks get rank
0's weights by a broadcast after the copies were made, as after loading a checkpoint of weights only; the first update
of the other ranks brings their old weights back. With bf16 a pretrained model was trained from scratch this way
(megablocks 80), and a restored checkpoint was overwritten at the next step (SkyRL 2149).
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

SAMPLES = 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc2(functional.gelu(self.norm(self.fc1(x))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=SAMPLES)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    teacher = torch.randn(16, 8)
    torch.manual_seed(100 + rank)  # ranks differ until the broadcast
    model = Model()
    masters = [nn.Parameter(weight.detach().clone()) for weight in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for weight, master in zip(model.parameters(), masters, strict=True):
        dist.broadcast(weight.data, 0)
        if args.mended:
            master.data.copy_(weight.data)

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
        for weight, master in zip(model.parameters(), masters, strict=True):
            dist.all_reduce(weight.grad)
            master.grad = weight.grad
        optimizer.step()
        for weight, master in zip(model.parameters(), masters, strict=True):
            weight.data.copy_(master.data)
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
