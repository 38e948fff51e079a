"""Trains a small GPT in one process: a plain PyTorch script."""

import argparse
import json
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pardemo.small_models import gpt


def train(options: argparse.Namespace):
    """Yields the model, the optimizer and the mean loss after each step of the optimizer."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = gpt.GPT(options.vocabulary, options.hidden, options.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = gpt.text(options.steps * options.accumulate * options.batch, 33, options.vocabulary)
    loader = DataLoader(samples, batch_size=options.batch)
    if options.resume:
        path = options.folder / f"step-{options.resume}.pt"
        saved = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    loss_of_step = 0.0
    for micro_batch, tokens in enumerate(loader, start=1):
        if micro_batch <= options.resume * options.accumulate:
            continue  # seen before the checkpoint
        tokens = tokens.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss_of_step += loss.item() / options.accumulate
        (loss / options.accumulate).backward()
        if micro_batch % options.accumulate:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        step = micro_batch // options.accumulate
        if step == options.save_at:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, options.folder / f"step-{step}.pt")
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
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")
    parser.add_argument("--folder", type=Path, default=Path(), help="where checkpoints are")
    parser.add_argument("--save-at", type=int, default=0, metavar="STEP", help="write a checkpoint after that step")
    parser.add_argument("--resume", type=int, default=0, metavar="STEP", help="go on from the checkpoint of that step")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    steps = list(train(parse()))
    print(json.dumps({"losses": [loss for *_, loss in steps]}))
