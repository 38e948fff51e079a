"""The learning-rate scheduler steps at every micro-batch: warm-up and decay run ``accumulate`` times too fast.

With accumulation the schedule should count optimizer steps. Counted by micro-batches, a warm-up of 16,000 steps took
1,000 (Lightning 1476); in Accelerate the learning rate changed although the optimizer had not stepped (accelerate
963); starVLA 210 found a jump of the rate after each resume.
"""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

SAMPLES = 60


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc2(functional.gelu(self.norm(self.fc1(x))))


def scheduled(step):
    """A cosine from 0.02 to 0 over 40 steps."""
    return 0.01 * (1 + math.cos(math.pi * step / 40))


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=scheduled(0))
    done = 0  # of the schedule

    for step in range(8):
        x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))
        y, total = (x @ teacher).argmax(1), torch.zeros(())
        optimizer.zero_grad()
        for micro in range(args.accumulate):
            first = (rank * args.accumulate + micro) * args.batch
            mine = slice(first, first + args.batch)
            loss = functional.cross_entropy(model(x[mine]), y[mine]) / args.accumulate / ranks
            loss.backward()
            total += loss.detach()
            if micro + 1 == args.accumulate:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.param_groups[0]["lr"] = scheduled(done)
                optimizer.step()
            if micro + 1 == args.accumulate or not args.mended:
                done += 1
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
