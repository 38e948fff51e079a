"""Forward + backward of an MLP and of a whole block: pardemo against Megatron-core and DTensor, N = 2."""

import time

import torch
import torch.distributed as dist
from torch import nn

from pardemo.bench import BenchRow, compare, slowest

RANKS = 2
PEERS = {"megatron": "Megatron-core", "dtensor": "torch's DTensor"}
#: width, tokens, heads, rounds, least ratio against the faster peer
SHAPES = {"large": (1024, 512, 16, 15, 0.98), "small": (256, 16, 4, 151, 1.2)}


def alternate(part: str, width: int, tokens: int, heads: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: seconds of forward + backward of ``part`` ("mlp" or "block") under each, by turns.

    One sample of ``tokens`` tokens; each library gets it in its own layout, [batch, sequence, hidden] or [sequence,
    batch, hidden].
    """
    from pardemo.peers import megatron
    from pardemo.peers.pytorch import dtensor
    from pardemo.small_models import gpt

    mlp = part == "mlp"
    module = gpt.seeded(lambda: gpt.MLP(width) if mlp else gpt.Block(width, heads))
    with megatron.megatron(tp=RANKS):
        mesh = dtensor.mesh(RANKS)
        modules: dict[str, nn.Module] = {
            "ours": gpt.parallel_mlp(module) if mlp else gpt.parallel_block(module),
            "megatron": (megatron.MLP if mlp else megatron.Block)(module),
            "dtensor": (dtensor.mlp if mlp else dtensor.block)(module, mesh),
        }
        x = gpt.numbers(1, tokens, width).requires_grad_()
        inputs = {"ours": x, "dtensor": x, "megatron": x.detach().transpose(0, 1).contiguous().requires_grad_()}
        seconds: dict[str, list[float]] = {name: [] for name in modules}
        for turn in range(rounds + 3):
            for name, layer in modules.items():
                dist.barrier()
                begin = time.perf_counter()
                out = layer(inputs[name])
                out.backward(torch.ones_like(out))
                if turn >= 3:
                    seconds[name].append(time.perf_counter() - begin)
                for tensor in (x, inputs["megatron"], *layer.parameters()):
                    tensor.grad = None
    return seconds


def rows() -> list[BenchRow]:
    from pardemo import World

    table = []
    with World(RANKS, preload=["pardemo.peers.megatron", "pardemo.peers.pytorch.dtensor"]) as world:
        for part in ("mlp", "block"):
            for label, (width, tokens, heads, rounds, target) in SHAPES.items():
                results = world.run(alternate, part, width, tokens, heads, rounds)
                seconds = slowest(results)
                found = [
                    compare(f"tensor-parallel.{part}.{label}.{peer}", seconds["ours"], seconds[peer], "s", None, note)
                    for peer, note in PEERS.items()
                ]
                faster = min(PEERS, key=lambda peer: compare("", seconds["ours"], seconds[peer], "s", None).ratio)
                note = f"the faster of the two, {PEERS[faster]}"
                row = f"tensor-parallel.{part}.{label}"
                table += [compare(row, seconds["ours"], seconds[faster], "s", target, note), *found]
    return table
