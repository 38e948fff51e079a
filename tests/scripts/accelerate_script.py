"""Accelerate: gradients accumulated, a scheduler, clipping, metrics gathered; on whatever the launcher gives.

accelerate launch accelerate_script.py, or torchrun --nproc-per-node 2 accelerate_script.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoTower(nn.Module):
    """Scores how well a query fits a document."""

    def __init__(self, vocab_size=3000, width=48):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab_size, width)
        self.query = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.document = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, queries, documents):
        return self.query(self.embed(queries)) @ self.document(self.embed(documents)).T


def get_dataloader(samples, batch_size, vocab_size=3000):
    generator = torch.Generator().manual_seed(11)
    documents = torch.randint(vocab_size, (samples, 24), generator=generator)
    return DataLoader(TensorDataset(documents[:, :6], documents), shuffle=True, batch_size=batch_size)


def training_function(args):
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    set_seed(args.seed)
    micro_batches = args.steps * args.gradient_accumulation_steps
    train_dataloader = get_dataloader(micro_batches * args.batch_size * accelerator.num_processes, args.batch_size)
    model = TwoTower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.steps)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    accelerator.print(f"{accelerator.num_processes} processes on {accelerator.device.type}, {type(model).__name__}")

    model.train()
    for queries, documents in train_dataloader:
        with accelerator.accumulate(model):
            scores = model(queries, documents)
            labels = torch.arange(len(scores), device=scores.device)
            loss = nn.functional.cross_entropy(scores, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            mean = accelerator.gather(loss.detach()).mean().item()
            accelerator.print(f"loss {mean:.4f}, lr {lr_scheduler.get_last_lr()[0]:.2e}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
