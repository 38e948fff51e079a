"""A layer of experts on two ranks, forward and backward: ours and Megatron-core's, with its all-to-all dispatcher."""

import torch
import torch.distributed as dist

from pardemo.bench import BenchRow, by_turns, compare, slowest

RANKS, ROUNDS, WARM = 2, 15, 2
#: tokens of a rank, hidden width, width of an expert, experts, experts of a token: small experts make moving rows count
SHAPES = {"wide": (2048, 256, 512, 8, 2), "narrow": (2048, 256, 64, 16, 4)}


def alternate(tokens: int, hidden: int, width: int, count: int, chosen: int) -> dict[str, list[float]]:
    """On every rank: seconds of forward and backward by each, by turns, on the same weights."""
    from pardemo.expert_parallel import ExpertParallel, Router
    from pardemo.peers import megatron_experts
    from pardemo.small_models import gpt
    from pardemo.small_models.mixture import Mixture

    plain = gpt.seeded(lambda: Mixture(Router(hidden, count, chosen), width))
    x = gpt.numbers(tokens, hidden, seed=dist.get_rank()).requires_grad_()
    with megatron_experts.expert_groups(dist.get_world_size()):
        layers: dict[str, torch.nn.Module] = {
            "ours": ExpertParallel(plain.router, plain.experts, shared=plain.shared),
            "megatron": megatron_experts.MegatronMixture(plain),
        }

        def both_passes(layer: torch.nn.Module) -> None:
            layer(x).square().sum().backward()

        return by_turns({name: lambda layer=layer: both_passes(layer) for name, layer in layers.items()}, ROUNDS, WARM)


def rows() -> list[BenchRow]:
    from pardemo import World

    table = []
    with World(RANKS, preload=["pardemo.peers.megatron_experts", "pardemo.expert_parallel"]) as world:
        for label, shape in SHAPES.items():
            seconds = slowest(world.run(alternate, *shape))
            note = "Megatron-core's MoELayer, all-to-all"
            table.append(compare(f"expert-parallel.{label}", seconds["ours"], seconds["megatron"], "s", 1.0, note))
    return table
