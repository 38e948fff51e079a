"""Trains a small GPT on whatever the launcher says: the plain script with Accelerate."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pardemo.peers.accelerate.training import cpu_ranks, load_state, save_state, what_runs
from pardemo.small_models import gpt


def train(options: argparse.Namespace):
    """Yields the model, the optimizer and the mean loss after each step of the optimizer."""
    torch.manual_seed(0)
    cpu_ranks()
    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    model = gpt.GPT(options.vocabulary, options.hidden, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = gpt.text(options.steps * options.accumulate * options.batch, 33, options.vocabulary)
    loader = DataLoader(samples, batch_size=options.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if options.resume:
        load_state(accelerator, options.folder / f"step-{options.resume}")
    loss_of_step = 0.0
    for micro_batch, tokens in enumerate(loader, start=1):
        if micro_batch <= options.resume * options.accumulate:
            continue  # seen before the checkpoint
        with accelerator.accumulate(model):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss_of_step += accelerator.reduce(loss.detach(), "mean").item() / options.accumulate
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            optimizer.zero_grad()
        if micro_batch % options.accumulate:
            continue
        step = micro_batch // options.accumulate
        if step == options.save_at:
            save_state(accelerator, options.folder / f"step-{step}")
        yield model, optimizer, loss_of_step
        loss_of_step = 0.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The script's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4, help="steps of the optimizer")
    parser.add_argument("--batch", type=int, default=8, help="samples of a micro-batch, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--clip", type=float, default=0.5, help="largest norm of the gradients")
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(), help="where checkpoints are")
    parser.add_argument("--save-at", type=int, default=0, metavar="STEP", help="write a checkpoint after that step")
    parser.add_argument("--resume", type=int, default=0, metavar="STEP", help="go on from the checkpoint of that step")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    steps = list(train(parse()))
    print(json.dumps({"losses": [loss for *_, loss in steps], **what_runs(steps[-1][0])}))
