"""A small model under DDP that saves, and goes on from what it saved; ``--forget`` leaves out what people leave out."""

import argparse
import copy
import io
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FORGET = (
    "all", "optimizer", "second-moment", "count", "scheduler", "sampler", "epoch", "random", "half", "head", "steps",
    "whole", "order", "python", "numpy", "scaler", "newest", "ranks", "average", "shadow",
)  # fmt: skip


class Slow(io.FileIO):
    """A file on a disk that stands still for a while before the first byte."""

    def __init__(self, path: Path, seconds: float):
        super().__init__(path, "w")
        self.seconds = seconds

    def write(self, data: bytes) -> int:
        time.sleep(self.seconds)
        self.seconds = 0
        return super().write(data)


class Shadow:
    """A moving average as people write it by hand: tensors by the parameters' names."""

    def __init__(self, model: nn.Module):
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.values[name].lerp_(p.detach(), 0.1)


def saved(path: Path, state: dict, atomic: bool, slow_s: float = 0) -> None:
    if not atomic:
        torch.save(state, path)
        return
    handle, name = tempfile.mkstemp(dir=path.parent)
    os.close(handle)
    with Slow(Path(name), slow_s) as file:
        torch.save(state, file)
    os.replace(name, path)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--every", type=int, default=2)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--forget", choices=FORGET, action="append", default=[])
    options.add_argument("--on-term", action="store_true", help="save and end when SIGTERM has come to any rank")
    options.add_argument("--alone", action="store_true", help="with --on-term: rank 0 alone listens, and asks nobody")
    options.add_argument("--noise", choices=("loss", "input"), action="append", default=[],
                         help="times a random number: the loss by one of Python's, the input by numpy's")  # fmt: skip
    options.add_argument("--scaler", action="store_true", help="scale the loss, by more every other step")
    options.add_argument("--log", action="store_true", help="append a line to a file behind each step")
    options.add_argument("--thread", type=float, metavar="S", help="save in a thread, which begins after S seconds")
    options.add_argument("--slow", type=float, default=0, metavar="S", help="a save takes so long; nobody waits for it")
    options.add_argument("--buckets-stay", action="store_true", help="DDP keeps the order of its first step's buckets")
    options.add_argument("--average", action="store_true", help="keep moving averages of the weights")
    options.add_argument("--lr", type=float, default=0.01)
    options.add_argument("--optimizer", choices=("AdamW", "Adafactor"), default="AdamW")
    given = options.parse_args()
    forget = set(given.forget)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 4))
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 8, generator=numbers), torch.randint(4, (48,), generator=numbers))
    sampler = DistributedSampler(data, seed=2)
    wrapped = DistributedDataParallel(model, find_unused_parameters=given.buckets_stay)
    optimizer = getattr(torch.optim, given.optimizer)(model.parameters(), lr=given.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - number / 40)
    moving = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=moving) if given.average else None
    shadow = Shadow(model)
    torch.manual_seed(3 + rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=given.scaler)
    step, term = 0, []
    if given.on_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if given.alone and rank else lambda *_: term.append(True))
    file, earlier = given.out / "last.pt", given.out / "earlier.pt"
    if file.exists() and "all" not in forget:
        read = torch.load(earlier if "newest" in forget else file, weights_only=True)
        weights = read["model"]
        if "head" in forget:
            weights = {name: value for name, value in weights.items() if not name.startswith("4.")}
        model.load_state_dict(weights, strict=False)
        states = read["optimizer"]
        for state in states["state"].values():
            if "second-moment" in forget:
                state["exp_avg_sq"].zero_()
            if "count" in forget:
                state["step"].zero_()
        if "optimizer" not in forget:
            optimizer.load_state_dict(states)
        if "scheduler" not in forget:
            scheduler.load_state_dict(read["scheduler"])
        if "steps" not in forget:
            step = read["step"]
        if len(read["random"]) != dist.get_world_size():
            torch.manual_seed(1000 * step + rank)  # where each rank was says nothing about others
        elif "random" not in forget:
            torch.set_rng_state(read["random"][rank])
        if "python" not in forget:
            random.setstate(read["python"])
        if "numpy" not in forget:
            name, keys, *rest = read["numpy"]
            np.random.set_state((name, keys.numpy(), *rest))
        if "scaler" not in forget:
            scaler.load_state_dict(read["scaler"])
        if average is not None and "average" not in forget:
            average.load_state_dict(read["average"])
            shadow.values = read["shadow"] if "shadow" not in forget else shadow.values
        if "ranks" in forget:
            sampler.rank = (rank + 1) % dist.get_world_size()
    begun = 0 if "sampler" in forget else step
    per_epoch = len(sampler) // given.batch
    for epoch in range(begun // per_epoch, given.epochs):
        sampler.set_epoch(0 if "epoch" in forget and begun else epoch + 1 if "order" in forget and begun else epoch)
        loader = DataLoader(data, given.batch, sampler=sampler, generator=torch.Generator())
        for number, (x, y) in enumerate(loader):
            if epoch == begun // per_epoch and number < begun % per_epoch:
                continue
            if "input" in given.noise:
                x = x * float(np.random.rand())
            loss = nn.functional.cross_entropy(wrapped(x), y)
            if "loss" in given.noise:
                loss = loss * random.random()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if average is not None:
                average.update_parameters(model)
                shadow.update(model)
            if given.log and rank == 0:
                with (given.out / "log.txt").open("a") as log:
                    log.write(f"{step} {loss.item()}\n")
            told = torch.tensor(len(term))
            if given.on_term and not given.alone:
                dist.all_reduce(told)  # SIGTERM comes to each rank somewhere else
            if step % given.every == 0 or told:
                states = [torch.empty_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
                dist.all_gather(states, torch.get_rng_state())
                weights = {name: value.bfloat16() if "half" in forget else value
                           for name, value in model.state_dict().items()}  # fmt: skip
                name, keys, *rest = np.random.get_state()
                state = {"model": weights, "optimizer": optimizer.state_dict(), "random": states,
                         "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "step": step,
                         "python": random.getstate(), "numpy": (name, torch.from_numpy(keys), *rest)}  # fmt: skip
                if average is not None:
                    state |= {"average": average.state_dict(), "shadow": shadow.values}
                if rank == 0 and given.thread is not None:
                    threading.Timer(given.thread, saved, (file, copy.deepcopy(state), True)).start()
                elif rank == 0:
                    if file.exists() and "newest" in forget:
                        os.replace(file, earlier)
                    saved(file, state, "whole" not in forget, given.slow)
                if not given.slow:
                    dist.barrier()
            if told:
                sys.exit(0)


main()
