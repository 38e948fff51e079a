"""A step of Muon on FSDP2's shards: ours against torch's; seconds, and bytes that a rank sends."""

import time

import torch
import torch.distributed as dist
from torch import nn

from pardemo.bench import BenchRow, compare, slowest

RANKS, ROUNDS, WARM, WIDTH, LAYERS = 2, 7, 1, 512, 4


def alternate() -> dict[str, list[float]]:
    """On every rank: seconds of a step by each, by turns, then the bytes sent in one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from pardemo import WireMeter
    from pardemo.optimizers import ShardedMuon
    from pardemo.small_models import gpt

    found: dict[str, list[float]] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, kind in (("ours", ShardedMuon), ("torch", torch.optim.Muon)):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        module = fully_shard(
            gpt.seeded(lambda layers=layers: nn.Sequential(*layers)), mesh=init_device_mesh("cpu", (RANKS,))
        )
        module(gpt.numbers(8, WIDTH, seed=dist.get_rank())).square().mean().backward()
        optimizers[name] = kind(module.parameters(), lr=1e-3)
        found[name], found[f"{name} sends"] = [], []
    for turn in range(ROUNDS + WARM):
        for name, optimizer in optimizers.items():
            dist.barrier()
            with WireMeter() as wire:
                begin = time.perf_counter()
                optimizer.step()
                seconds = time.perf_counter() - begin
            if turn >= WARM:
                found[name].append(seconds)
                found[f"{name} sends"].append(wire.sent_bytes)
    return found


def rows() -> list[BenchRow]:
    from pardemo import World

    with World(RANKS, preload=["torch.distributed.fsdp", "pardemo.optimizers"]) as world:
        found = slowest(world.run(alternate))
    note = "torch.optim.Muon on the same shards"
    return [
        compare("muon.step", found["ours"], found["torch"], "s", 1.0, note),
        compare("muon.sent", found["ours sends"], found["torch sends"], "B", 5.0, note),
    ]
