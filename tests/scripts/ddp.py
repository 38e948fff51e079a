"""DistributedDataParallel with accumulated gradients: a classifier of token sequences on made-up data.

torchrun --nproc-per-node 2 ddp.py --steps 6
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, vocabulary, width, depth, classes):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def data(samples, length, vocabulary, classes):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (samples, length), generator=generator)
    return TensorDataset(tokens, tokens.sum(1) % classes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = Classifier(vocabulary=2000, width=64, depth=2, classes=10).to(device)
    model = DDP(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loss_function = nn.CrossEntropyLoss()

    samples = data(args.steps * args.accumulate * args.batch * dist.get_world_size(), 32, 2000, 10)
    sampler = DistributedSampler(samples, shuffle=True)
    loader = DataLoader(samples, batch_size=args.batch, sampler=sampler, pin_memory=device.type == "cuda")

    model.train()
    for number, (tokens, labels) in enumerate(loader, start=1):
        tokens, labels = tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        last = number % args.accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_function(model(tokens), labels) / args.accumulate
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if dist.get_rank() == 0:
                print(f"step {number // args.accumulate}: loss {loss.item() * args.accumulate:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
