"""Hybrid sharding: parameters are sharded within a node and replicated between nodes, over a mesh of two dimensions.

torchrun --nproc-per-node 4 hsdp.py --shard 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class MixerBlock(nn.Module):
    """Mixes along the sequence, then along the features."""

    def __init__(self, length, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.along_sequence = nn.Sequential(nn.Linear(length, 2 * length), nn.GELU(), nn.Linear(2 * length, length))
        self.along_features = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.along_sequence(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along_features(self.norm_2(x))


class Mixer(nn.Module):
    def __init__(self, vocabulary, length, width, depth):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(MixerBlock(length, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.classify(self.norm(x).mean(dim=1))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--shard", type=int, default=2, help="ranks that share one copy of the parameters")
    parser.add_argument("--batch-size", type=int, default=8)
    return parser.parse_args()


def main():
    args = parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device(f"cuda:{local_rank}"))
    mesh = init_device_mesh("cuda", (dist.get_world_size() // args.shard, args.shard), mesh_dim_names=("dp", "fsdp"))

    torch.manual_seed(42)  # the same parameters everywhere
    vocabulary, length = 1200, 24
    model = Mixer(vocabulary, length, width=80, depth=3).cuda()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    torch.manual_seed(1000 + dist.get_rank())  # other samples on each rank
    for step in range(args.steps):
        tokens = torch.randint(0, vocabulary, (args.batch_size, length), device="cuda")
        loss = F.cross_entropy(model(tokens), tokens[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"[{step + 1}/{args.steps}] loss = {loss.item():.4f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
