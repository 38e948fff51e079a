"""Steps of the engines and layers, on two ranks, against those of torch, Megatron-core and DeepSpeed."""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bench.table import BenchRow, by_turns, compare, on_ranks, slowest
from pardemo import pipeline_parallel as pp
from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel
from pardemo.meters import WireMeter
from pardemo.small_models import gpt

RANKS = 2
Times = dict[str, list[float]]


def data_parallel() -> Iterator[BenchRow]:
    """One training step: our wrappers against torch's DistributedDataParallel, same model."""
    shapes = {"small": (256, 8, 16, 41), "medium": (512, 8, 64, 21), "large": (1024, 8, 64, 13)}
    note = "torch's DDP, its defaults"
    targets = {"bucketed": 0.9, "naive": None}
    rows = [(f"data-parallel.{name}.{{}}", name, "torch", target, note) for name, target in targets.items()]
    return on_ranks(wrapped_steps, shapes, rows)


def wrapped_steps(width: int, layers: int, samples: int, rounds: int) -> Times:
    """On every rank: seconds of a step under each wrapper."""
    batch = torch.randn(samples, width)

    def step_under(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
        model = wrap(nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return step

    wrappers = {"bucketed": BucketedDataParallel, "naive": NaiveDataParallel, "torch": DistributedDataParallel}
    return by_turns({name: step_under(wrap) for name, wrap in wrappers.items()}, rounds, warm=3)


def pipeline() -> Iterator[BenchRow]:
    """Forward and backward of a batch: our executor against torch.distributed.pipelining."""
    sizes = {"small": (64, 16, 4, 101), "large": (256, 128, 4, 21)}
    orders = ("gpipe", "one_f_one_b", "interleaved")
    shapes = {f"{order}.{label}": (order, *size) for order in orders for label, size in sizes.items()}
    return on_ranks(pipelined, shapes, [("pipeline.{}", "ours", "torch", 1.0, "torch.distributed.pipelining")])


def pipelined(order: str, width: int, samples: int, layers: int, rounds: int) -> Times:
    """On every rank: seconds of a step; the same stages, and 8 micro-batches of ``samples``."""
    from pardemo.peers.pytorch.pipelining import TorchPipeline

    count = 8
    schedule = pp.Schedule(getattr(pp, order), RANKS, count, 2 if order == "interleaved" else 1)

    def stages() -> list[nn.Module]:
        model = [gpt.seeded(lambda: gpt.MLP(width), seed) for seed in range(layers)]
        return pp.cut_by_layers(model, schedule.stages)[dist.get_rank() :: RANKS]

    chunks = {"ours": stages(), "torch": stages()}
    ours = pp.Pipeline(chunks["ours"], schedule, F.mse_loss)
    theirs = TorchPipeline(chunks["torch"], order, count, F.mse_loss)
    x, y = (gpt.numbers(samples * count, width, seed=seed) for seed in (0, 1))
    ways = {"ours": lambda: ours.step(x, y), "torch": lambda: theirs.step(x, y)}
    return by_turns(ways, rounds, warm=3, after=lambda name: [chunk.zero_grad() for chunk in chunks[name]])


def tensor_parallel() -> Iterator[BenchRow]:
    """Forward and backward of an MLP and of a whole block, against Megatron-core's and DTensor's."""
    from pardemo import World

    peers = {"megatron": "Megatron-core", "dtensor": "torch's DTensor"}
    # width, tokens, heads, rounds, least ratio against the faster peer
    shapes = {"large": (1024, 512, 16, 15, 0.98), "small": (256, 16, 4, 151, 1.2)}
    with World(RANKS, preload=["pardemo.peers.megatron", "pardemo.peers.pytorch.dtensor"]) as world:
        for part in ("mlp", "block"):
            for label, (*shape, target) in shapes.items():
                seconds = slowest(world.run(split_layers, part, *shape))
                faster = min(peers, key=lambda peer: median(seconds[peer]))
                row, ours = f"tensor-parallel.{part}.{label}", seconds["ours"]
                yield compare(row, ours, seconds[faster], "s", target, f"the faster of the two, {peers[faster]}")
                for peer, note in peers.items():
                    yield compare(f"{row}.{peer}", ours, seconds[peer], "s", None, note)


def split_layers(part: str, width: int, tokens: int, heads: int, rounds: int) -> Times:
    """On every rank: seconds of forward and backward of ``part`` ("mlp" or "block"), on one sample.

    Each library gets it in its own layout, [batch, sequence, hidden] or [sequence, batch, hidden].
    """
    from pardemo.peers import megatron
    from pardemo.peers.pytorch import dtensor

    mlp = part == "mlp"
    module = gpt.seeded(lambda: gpt.MLP(width) if mlp else gpt.Block(width, heads))
    with megatron.megatron(tp=RANKS):
        modules: dict[str, nn.Module] = {
            "ours": gpt.parallel_mlp(module) if mlp else gpt.parallel_block(module),
            "megatron": (megatron.MLP if mlp else megatron.Block)(module),
            "dtensor": (dtensor.mlp if mlp else dtensor.block)(module, dtensor.mesh(RANKS)),
        }
        x = gpt.numbers(1, tokens, width).requires_grad_()
        inputs = {"ours": x, "dtensor": x, "megatron": x.detach().transpose(0, 1).contiguous().requires_grad_()}

        def both_passes(name: str) -> None:
            out = modules[name](inputs[name])
            out.backward(torch.ones_like(out))

        def clear(name: str) -> None:
            for tensor in (inputs[name], *modules[name].parameters()):
                tensor.grad = None

        return by_turns({name: partial(both_passes, name) for name in modules}, rounds, warm=3, after=clear)


def context_parallel() -> Iterator[BenchRow]:
    """Attention over a sequence that the ranks share: a ring, Ulysses, and DeepSpeed's Ulysses."""
    # tokens of the whole sequence, heads of queries, of keys, width of a head
    shapes = {"heads": (4096, 8, 8, 64), "grouped": (4096, 8, 2, 64)}
    rows = [
        (f"context-parallel.{way}.{{}}", way, "deepspeed", 1.0, "DeepSpeed's Ulysses") for way in ("ring", "ulysses")
    ]
    return on_ranks(
        attention, shapes, rows, preload=["pardemo.peers.deepspeed.ulysses", "pardemo.context_parallel"]
    )  # fmt: skip


def attention(tokens: int, heads: int, groups: int, width: int) -> Times:
    """On every rank: seconds of forward and backward."""
    from pardemo.context_parallel import ring_attention, ulysses_attention
    from pardemo.peers.deepspeed import ulysses as deepspeed

    here, seed = tokens // dist.get_world_size(), dist.get_rank()
    inputs = [gpt.numbers(1, count, here, width, seed=seed).requires_grad_() for count in (heads, groups, groups)]

    def both_passes(attend: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(attend(*inputs).sum(), inputs)

    ways = {"ring": ring_attention, "ulysses": ulysses_attention, "deepspeed": deepspeed.attention}
    return by_turns({name: partial(both_passes, way) for name, way in ways.items()}, 15, warm=2)


def expert_parallel() -> Iterator[BenchRow]:
    """A layer of experts: ours and Megatron-core's, with its all-to-all dispatcher."""
    # tokens of a rank, hidden width, width of an expert, experts, experts of a token: with small experts moving counts
    shapes = {"wide": (2048, 256, 512, 8, 2), "narrow": (2048, 256, 64, 16, 4)}
    rows = [("expert-parallel.{}", "ours", "megatron", 1.0, "Megatron-core's MoELayer, all-to-all")]
    return on_ranks(experts, shapes, rows, preload=["pardemo.peers.megatron_experts", "pardemo.expert_parallel"])


def experts(tokens: int, hidden: int, width: int, count: int, chosen: int) -> Times:
    """On every rank: seconds of forward and backward, on the same weights."""
    from pardemo.expert_parallel import ExpertParallel, Router
    from pardemo.peers import megatron_experts
    from pardemo.small_models.mixture import Mixture

    plain = gpt.seeded(lambda: Mixture(Router(hidden, count, chosen), width))
    x = gpt.numbers(tokens, hidden, seed=dist.get_rank()).requires_grad_()

    def both_passes(layer: nn.Module) -> None:
        layer(x).square().sum().backward()

    with megatron_experts.expert_groups(dist.get_world_size()):
        layers: dict[str, nn.Module] = {
            "ours": ExpertParallel(plain.router, plain.experts, shared=plain.shared),
            "megatron": megatron_experts.MegatronMixture(plain),
        }
        return by_turns({name: partial(both_passes, layer) for name, layer in layers.items()}, 15, warm=2)


def muon() -> Iterator[BenchRow]:
    """A step of Muon on FSDP2's shards: ours against torch's; seconds, and bytes that a rank sends."""
    note = "torch.optim.Muon on the same shards"
    rows = [
        ("muon.step", "ours", "torch", 1.0, note),
        ("muon.sent", "ours.bytes", "torch.bytes", 5.0, note, "B"),
    ]
    return on_ranks(muon_steps, {"": ()}, rows, preload=["torch.distributed.fsdp", "pardemo.optimizers"])


def muon_steps() -> Times:
    """On every rank: seconds of a step, and the bytes of one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from pardemo.optimizers import ShardedMuon

    width, steps = 512, {}
    for name, kind in (("ours", ShardedMuon), ("torch", torch.optim.Muon)):
        stack = gpt.seeded(lambda: nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)]))
        module = fully_shard(stack, mesh=init_device_mesh("cpu", (RANKS,)))
        module(gpt.numbers(8, width, seed=dist.get_rank())).square().mean().backward()
        steps[name] = kind(module.parameters(), lr=1e-3).step
    return by_turns(steps, 7, warm=1) | sent_bytes(steps)


def zero() -> Iterator[BenchRow]:
    """A training step under ZeRO: our stages against DeepSpeed's, same model, batch and optimizer."""
    note = "DeepSpeed's stage {}, its defaults"
    rows = [
        ("zero.stage_{}", "ours", "deepspeed", 1.0, note),
        ("zero.stage_{}.bytes", "ours.bytes", "deepspeed.bytes", None, note, "B"),
    ]
    shapes = {str(stage): (stage,) for stage in (1, 2, 3)}
    return on_ranks(zero_steps, shapes, rows, preload=["pardemo.peers.deepspeed.engine"])


def zero_steps(stage: int) -> Times:
    """On every rank: seconds of a step (forward, backward, update), and the bytes of one."""
    from pardemo.peers.deepspeed import engine as deepspeed
    from pardemo.zero import Zero1, Zero2, Zero3

    width, samples = 512, 64

    def stack() -> nn.Module:
        return gpt.seeded(lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]))

    ours = {1: Zero1, 2: Zero2, 3: Zero3}[stage](stack().bfloat16(), partial(torch.optim.AdamW, lr=1e-4))
    theirs = deepspeed.engine(stack(), deepspeed.zero_settings(stage, batch=samples, lr=1e-4))
    x = gpt.numbers(samples, width, dtype=torch.bfloat16)

    def our_step() -> None:
        ours(x).square().mean().backward()
        ours.step()

    def their_step() -> None:
        theirs.backward(theirs(x).square().mean())
        theirs.step()

    steps = {"ours": our_step, "deepspeed": their_step}
    measured = by_turns(steps, 15, warm=3) | sent_bytes(steps)
    deepspeed.close(theirs)
    return measured


def sent_bytes(steps: dict[str, Callable[[], object]]) -> Times:
    """Bytes that this rank sends in one more of each, as ``<name>.bytes``."""
    sent = {}
    for name, step in steps.items():
        with WireMeter() as wire:
            step()
        sent[f"{name}.bytes"] = [float(wire.sent_bytes)]
    return sent
