"""FullyShardedDataParallel, the first: an encoder and a decoder, wrapped block by block by an auto-wrap policy.

torchrun --nproc_per_node 2 fsdp1.py
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Reversals(Dataset):
    """Sequences, and the same ones backwards."""

    def __init__(self, samples, length, vocab_size):
        self.tokens = torch.randint(1, vocab_size, (samples, length), generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index], self.tokens[index].flip(0)


class Seq2Seq(nn.Module):
    def __init__(self, vocab_size=1024, d_model=64, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        shape = {"d_model": d_model, "nhead": 4, "dim_feedforward": 3 * d_model, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**shape) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**shape) for _ in range(layers))
        self.lm_head = nn.Linear(d_model, vocab_size)

    def forward(self, source, target):
        memory, x = self.embedding(source), self.embedding(target)
        for layer in self.encoder:
            memory = layer(memory)
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return self.lm_head(x)


def train(args, model, rank, loader, optimizer, scheduler):
    model.train()
    criterion = nn.CrossEntropyLoss()
    total = torch.zeros(2, device=rank)
    for number, (source, target) in enumerate(loader, start=1):
        source, target = source.to(rank), target.to(rank)
        optimizer.zero_grad()
        output = model(source, target[:, :-1])
        loss = criterion(output.flatten(0, 1), target[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(args.clip)
        optimizer.step()
        scheduler.step()
        total += torch.tensor([loss.item(), 1.0], device=rank)
        if number == args.steps:
            break
    dist.all_reduce(total)
    if rank == 0:
        print(f"mean loss of {number} steps: {total[0] / total[1]:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--strategy", default="FULL_SHARD", choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    args = parser.parse_args()

    local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    dist.init_process_group("nccl")
    torch.cuda.set_device(local_rank)

    samples = Reversals(args.steps * args.batch_size * dist.get_world_size(), 20, 1024)
    sampler = DistributedSampler(samples, rank=rank, num_replicas=dist.get_world_size(), shuffle=True)
    loader = DataLoader(samples, args.batch_size, sampler=sampler, num_workers=1, pin_memory=True)

    blocks = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
    model = FSDP(
        Seq2Seq(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16) if args.bf16 else None,
        sharding_strategy=ShardingStrategy[args.strategy],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.cuda.current_device(),
        sync_module_states=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    train(args, model, local_rank, loader, optimizer, scheduler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
