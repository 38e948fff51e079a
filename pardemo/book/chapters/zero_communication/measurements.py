"""Measures what the engines that shard send in one optimizer step: by the calls they make, and by the kernel's
count."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pardemo.cluster import Cluster
from pardemo.meters import WireMeter
from pardemo.meters.links import LinkMeter
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.procedure import adds, job_of
from pardemo.small_models import gpt
from pardemo.world.rank import device

BATCH = 8
#: What FSDP2 can keep whole, from the least memory to the most.
KEEPS = ("nothing", "weights to backward", "weights", "gradients", "both")


#: What the planner calls each way to shard.
SHARDINGS = {"ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3"}


@dataclasses.dataclass(frozen=True)
class Sent:
    """The traffic of one rank in a step, in Ψ(N−1)/N of 2-byte numbers.

    Attributes: ``calls``: what its collectives would send on rings, which is what nccl does. ``wire``: counted by the
    kernel where it can, with whatever algorithms the backend has.
    """

    calls: float
    wire: float


def added(tokens: int, micro_batches: int) -> dict[str, float]:
    """Predicts what each way to shard adds to the computation by the book's rule, as a share of it.

    A dense model on four nodes of eight H100s, each node with 400 GB/s of network cards; its size cancels.

    Args:
        tokens: of a micro-batch on one GPU.
    """
    job = job_of("llama3-8b", "H100", 32, 400, sequence=tokens)
    layout = Layout(dp=32, accumulation=micro_batches)
    return {way: adds(job, layout.but(sharding=name))["data parallel"] for way, name in SHARDINGS.items()}


def deepspeed(
    width: int, layers: int, stage: int, options: Mapping[str, Any] | None = None, micro_batches: int = 1
) -> Sent:
    """DeepSpeed's engine under a ZeRO stage (0 to 3); ``options`` are keys of ``zero_optimization``. Collective."""
    from pardemo.peers.deepspeed import engine as peer

    engine, step = _deepspeed(width, layers, stage, options, micro_batches)
    sent = _sent(step, width, layers, warm_up=2 if stage == 3 else 1)  # it learns the order of the layers
    peer.close(engine)
    return sent


def deepspeed_between_nodes(width: int, layers: int, cluster: Cluster, hpz: bool) -> int | None:
    """Bytes that node 0's ranks send to other nodes in a step of DeepSpeed's ZeRO-3, always sharded. Collective.

    None on ranks without GPUs where DeepSpeed has found some: it would compute on them.

    Args:
        hpz: with ``zero_hpz_partition_size``, the ranks of a node, so that each keeps a second copy of its node's
            part for the backward pass.

    Raises:
        RuntimeError: the engine does not do what it was asked for: a second copy of another size, or of other ranks.
    """
    from pardemo.peers.deepspeed import engine as peer

    if not peer.computes_on(device()):
        return None
    size = cluster.ranks_per_host
    options = peer.ALWAYS_SHARDED | ({"zero_hpz_partition_size": size} if hpz else {})
    engine, step = _deepspeed(width, layers, 3, options, 1)
    for _ in range(2):  # opens the connections, and learns the order of the layers
        step()
    x = gpt.numbers(BATCH, width, dtype=torch.bfloat16).to(device())
    with LinkMeter(cluster) as links:
        loss = engine(x).square().mean()
        copies = [peer.second_copy(parameter) for parameter in engine.module.parameters()]  # the step's end drops it
        engine.backward(loss)
        engine.step()
    expected = (size, cluster.ranks_of(cluster.host_of(dist.get_rank()))) if hpz else None
    if any(copy != expected for copy in copies):
        raise RuntimeError(f"asked for second copies {expected}, DeepSpeed has {copies} (cut in so many, over ranks)")
    peer.close(engine)
    return links.hosts[0][0]


def fsdp(width: int, layers: int, keep: str = "nothing", micro_batches: int = 1) -> Sent:
    """torch's ``fully_shard``, computing in bf16. Collective.

    Args:
        keep: what stays whole on each rank, one of :data:`KEEPS`: weights from forward to backward, weights or
            gradients until the last micro-batch, or both.

    Raises:
        ValueError: ``keep`` is none of them.
    """
    from pardemo.peers.pytorch import fsdp as peer

    if keep not in KEEPS:
        raise ValueError(f"keep is one of {', '.join(KEEPS)}, not {keep!r}")
    net = gpt.linear_stack(width, layers).to(device())
    peer.shard(net, reshard_after_forward=keep in ("nothing", "gradients"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = gpt.numbers(BATCH, width).to(device())

    def step() -> None:
        for number in range(micro_batches):
            last = number == micro_batches - 1
            net.set_requires_gradient_sync(last or keep not in ("gradients", "both"))
            net.set_reshard_after_backward(last or keep not in ("weights", "both"))
            net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _sent(step, width, layers)


def losses(width: int, layers: int, engine: str, steps: int = 5) -> list[float]:
    """This rank's losses with torch's DDP (``"DDP"``) or DeepSpeed's stage 0, in fp32 with AdamW. Collective."""
    from pardemo.peers.deepspeed import engine as peer

    net = gpt.linear_stack(width, layers).to(device())
    if engine == "DDP":
        run = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    else:
        settings = peer.zero_settings(0, batch=BATCH) | {"bf16": {"enabled": False}}
        settings["optimizer"]["params"]["weight_decay"] = 0.01  # torch's default
        run = peer.engine(net, settings)
    losses = []
    for step in range(steps):
        x = gpt.numbers(BATCH, width, seed=100 * step + dist.get_rank()).to(device())
        loss = (run(x) - 1).square().mean()
        losses.append(loss.item())
        if engine == "DDP":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            run.backward(loss)
            run.step()
    if engine != "DDP":
        peer.close(run)
    return losses


def _deepspeed(width, layers, stage, options, micro_batches) -> tuple[Any, Callable[[], None]]:
    from pardemo.peers.deepspeed import engine as peer

    settings = peer.zero_settings(stage, BATCH, micro_batches=micro_batches, **(options or {}))
    engine = peer.engine(gpt.linear_stack(width, layers).to(device()), settings)
    x = gpt.numbers(BATCH, width, dtype=torch.bfloat16).to(device())

    def step() -> None:
        for _ in range(micro_batches):
            engine.backward(engine(x).square().mean())
            engine.step()  # takes part in every micro-batch, and updates after the last

    return engine, step


def _sent(step: Callable[[], None], width: int, layers: int, warm_up: int = 1) -> Sent:
    for _ in range(warm_up):  # opens the connections
        step()
    with WireMeter(evidence="count") as calls, WireMeter() as wire:
        step()
    size = dist.get_world_size()
    unit = 2 * layers * width**2 * (size - 1) / size
    return Sent(calls.sent_bytes / unit, wire.sent_bytes / unit)
