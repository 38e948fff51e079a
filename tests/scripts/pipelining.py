"""A pipeline of stages with the schedule 1F1B, or GPipe, by torch.distributed.pipelining.

torchrun --nproc-per-node 2 pipelining.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

VOCABULARY, DIM, LAYERS = 1600, 72, 4


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.mix(self.norm(x))[0]
        return x + self.mlp(x)


class Stage(nn.Module):
    """Some of the model's layers; the first stage embeds, the last one has the head."""

    def __init__(self, layers, first, last):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM) if first else None
        self.layers = nn.ModuleDict({str(n): Block(DIM) for n in layers})
        self.head = nn.Linear(DIM, VOCABULARY) if last else None

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def tokenwise_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
    args = parser.parse_args()

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{int(os.environ['LOCAL_RANK'])}" if torch.cuda.is_available() else "cpu")
    dist.init_process_group(device_id=device if device.type == "cuda" else None)

    torch.manual_seed(rank)
    each = LAYERS // world_size
    module = Stage(range(rank * each, (rank + 1) * each), rank == 0, rank == world_size - 1).to(device)
    stage = PipelineStage(module, rank, world_size, device)
    schedules = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    schedule = schedules[args.schedule](stage, n_microbatches=args.micro_batches, loss_fn=tokenwise_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(5)  # all ranks have the same batches
    for step in range(args.steps):
        tokens = torch.randint(VOCABULARY, (args.batch_size, args.length + 1), generator=generator).to(device)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens[:, :-1].contiguous())
        elif rank == world_size - 1:
            losses = []
            schedule.step(target=tokens[:, 1:].contiguous(), losses=losses)
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}")
        else:
            schedule.step()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
