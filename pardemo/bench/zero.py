"""A training step under ZeRO: pardemo's stages against DeepSpeed's, same model, batch and optimizer, N = 2."""

from functools import partial

import torch
from torch import nn

from pardemo.bench import BenchRow, by_turns, compare, slowest
from pardemo.meters import WireMeter

RANKS = 2
WIDTH, LAYERS, SAMPLES = 512, 8, 64
ROUNDS = 15


def alternate(stage: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: seconds of a step (forward, backward, update) under each, by turns, and the bytes of one."""
    from pardemo.peers.deepspeed import engine as deepspeed
    from pardemo.small_models import gpt
    from pardemo.zero import Zero1, Zero2, Zero3

    def stack() -> nn.Module:
        return gpt.seeded(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))

    own = {1: Zero1, 2: Zero2, 3: Zero3}[stage](stack().bfloat16(), partial(torch.optim.AdamW, lr=1e-4))
    theirs = deepspeed.engine(stack(), deepspeed.zero_settings(stage, batch=SAMPLES, lr=1e-4))
    x = gpt.numbers(SAMPLES, WIDTH, dtype=torch.bfloat16)

    def own_step() -> None:
        own(x).square().mean().backward()
        own.step()

    def their_step() -> None:
        theirs.backward(theirs(x).square().mean())
        theirs.step()

    steps = {"ours": own_step, "deepspeed": their_step}
    seconds = by_turns(steps, rounds, warm=3)
    for name, step in steps.items():
        with WireMeter() as wire:
            step()
        seconds[f"{name}.bytes"] = [wire.sent_bytes]
    deepspeed.close(theirs)
    return seconds


def rows() -> list[BenchRow]:
    from pardemo import World

    table = []
    with World(RANKS, preload=["pardemo.peers.deepspeed.engine"]) as world:
        for stage in (1, 2, 3):
            results = world.run(alternate, stage, ROUNDS)
            worst = slowest(results)
            peer = f"DeepSpeed's stage {stage}, its defaults"
            table.append(compare(f"zero.stage_{stage}", worst["ours"], worst["deepspeed"], "s", 1.0, peer))
            sent = worst["ours.bytes"], worst["deepspeed.bytes"]
            table.append(compare(f"zero.stage_{stage}.bytes", *sent, "B", None, peer))
    return table
