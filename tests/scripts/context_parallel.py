"""Context parallel: each rank has a part of every sequence, and attention goes round a ring.

torchrun --nproc-per-node 2 context_parallel.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY = 1100


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, dim=64, heads=4, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens, positions):
        x = self.embedding(tokens) + positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sinusoids(length, dim, device):
    angles = torch.arange(length, device=device)[:, None] / 1e4 ** (torch.arange(0, dim, 2, device=device) / dim)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rotate", choices=["allgather", "alltoall"], default="allgather")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))

    set_rotate_method(args.rotate)
    torch.manual_seed(0)  # the same parameters and the same samples on all ranks
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        tokens = torch.randint(VOCABULARY, (args.batch, args.length + 1), device=device)
        inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        positions = sinusoids(args.length, 64, device)
        buffers = [inputs, labels, positions]
        ring = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=set(buffers))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]), ring:
            loss = F.cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten())
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=mesh.get_group())
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=mesh.get_group())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
