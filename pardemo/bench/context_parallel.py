"""Attention over a sequence that two ranks share, forward and backward: a ring, Ulysses, and DeepSpeed's Ulysses."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from pardemo.bench import BenchRow, by_turns, compare, slowest

RANKS, ROUNDS, WARM = 2, 15, 2
#: tokens of the whole sequence, heads of queries, of keys, width of a head
SHAPES = {"heads": (4096, 8, 8, 64), "grouped": (4096, 8, 2, 64)}


def alternate(tokens: int, heads: int, groups: int, width: int) -> dict[str, list[float]]:
    """On every rank: seconds of forward and backward by each, by turns."""
    from pardemo.context_parallel import ring_attention, ulysses_attention
    from pardemo.peers.deepspeed import ulysses as deepspeed
    from pardemo.small_models import gpt

    here = tokens // dist.get_world_size()
    seed = dist.get_rank()
    inputs = [gpt.numbers(1, count, here, width, seed=seed).requires_grad_() for count in (heads, groups, groups)]
    ways = {"ring": ring_attention, "ulysses": ulysses_attention, "deepspeed": deepspeed.attention}

    def both_passes(attention: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(attention(*inputs).sum(), inputs)

    return by_turns({name: partial(both_passes, way) for name, way in ways.items()}, ROUNDS, WARM)


def rows() -> list[BenchRow]:
    from pardemo import World

    table = []
    with World(RANKS, preload=["pardemo.peers.deepspeed.ulysses", "pardemo.context_parallel"]) as world:
        for label, shape in SHAPES.items():
            seconds = slowest(world.run(alternate, *shape))
            for ours in ("ring", "ulysses"):
                name = f"context-parallel.{ours}.{label}"
                table.append(compare(name, seconds[ours], seconds["deepspeed"], "s", 1.0, "DeepSpeed's Ulysses"))
    return table
