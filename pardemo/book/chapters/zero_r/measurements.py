"""DeepSpeed's optimizer states on the GPU, on the host (ZeRO-Offload), on disk (ZeRO-Infinity): a few steps each."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pardemo import MemoryMeter, WireMeter
from pardemo.data_parallel import BucketedDataParallel
from pardemo.groups import Groups, ParallelDims
from pardemo.meters.padding import PaddedModule
from pardemo.meters.tensors import storage_bytes
from pardemo.peers.deepspeed import deepspeed_disk
from pardemo.peers.deepspeed import engine as deepspeed
from pardemo.peers.deepspeed import engine as peer
from pardemo.small_models import gpt
from pardemo.world.rank import device
from pardemo.zero.zero_r import HostStore, partitioned_checkpoint

BATCH, STEPS = 8, 3


@dataclass(frozen=True)
class OffloadedTraining:
    """``losses`` of the steps; ``gradients_beside``: bytes of gradients that lie beside the fp32 weights of a rank's
    shard when the step comes, which is where the optimizer is."""

    losses: tuple[float, ...]
    gradients_beside: int

    def apart(self, other: "OffloadedTraining") -> float:
        """The largest difference of two trainings' losses."""
        return max(abs(loss - other_loss) for loss, other_loss in zip(self.losses, other.losses, strict=True))


def train(width: int, layers: int, offload: str | None = None) -> OffloadedTraining:
    """Three steps of ZeRO-3 in fp32; ``offload`` is None, "cpu", or the folder of a disk. Collective."""
    settings = peer.zero_settings(3, BATCH) | {"bf16": {"enabled": False}, "aio": {"block_size": 1 << 20}}
    if offload == "cpu":
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    elif offload is not None:
        deepspeed_disk.use()
        settings["zero_optimization"] |= deepspeed_disk.to_disk(offload)
    engine, losses, beside = peer.engine(gpt.linear_stack(width, layers), settings), [], 0
    for step in range(STEPS):
        loss = (engine(gpt.numbers(BATCH, width, seed=step).to(device())) - 1).square().mean()
        engine.backward(loss)
        if offload == "cpu" or offload is None:  # on disk they are files
            beside = storage_bytes(master.grad for master in engine.optimizer.fp32_partitioned_groups_flat)
        engine.step()
        losses.append(loss.item())
    peer.close(engine)
    return OffloadedTraining(tuple(losses), beside)


_Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BlockBytes:
    """For each block of a rank: bytes ``kept`` for the backward pass, bytes ``sent`` in a step; and how far the
    gradient of the input is from the one without checkpoints, relatively."""

    kept: float
    sent: float
    error: float = 0.0


def checkpointed_blocks(b: int, s: int, h: int, heads: int) -> tuple[dict[str, BlockBytes], str]:
    """Two tensor-parallel blocks, run in five ways and once with a batch N times larger. Collective.

    Returns:
        way -> its bytes, and the evidence of the bytes that were sent.
    """
    blocks = [gpt.parallel_block(gpt.seeded(lambda: gpt.Block(h, heads)).to(device())) for _ in range(2)]
    again = partial(checkpoint, use_reentrant=False)

    def measure(run: _Run, samples: int = b) -> tuple[float, float, torch.Tensor]:
        x = gpt.numbers(samples, s, h).to(device()).requires_grad_()
        with MemoryMeter() as memory, WireMeter() as wire:
            y = x.clone()
            for block in blocks:
                y = run(block, y)
            kept = (memory.live["activations"] - y.nbytes) / len(blocks)
            y.sum().backward()
        return kept, wire.sent_bytes / len(blocks), x.grad

    measured = {"no checkpoint": measure(lambda block, x: block(x))}
    with set_checkpoint_early_stop(False):
        measured["run to its end"] = measure(again)
    measured["PyTorch's default"] = measure(again)
    measured["P_a"] = measure(partitioned_checkpoint)
    with Groups(ParallelDims(tp=dist.get_world_size())) as groups:
        theirs = deepspeed.checkpointing(groups, partition=True)
        measured["DeepSpeed's P_a"] = measure(theirs.checkpoint)
        theirs.reset()
    right = measured["no checkpoint"][2]
    ways = {way: BlockBytes(*values[:2], gpt.relative_error(values[2], right)) for way, values in measured.items()}
    ways["P_a, larger batch"] = BlockBytes(*measure(partitioned_checkpoint, dist.get_world_size() * b)[:2])
    return ways, WireMeter().evidence


def parts_on_host(b: int, s: int, h: int, heads: int) -> dict[str, int]:
    """P_a+cpu of two blocks: bytes that stay on the device, go out, come back. Collective."""
    blocks = [gpt.parallel_block(gpt.seeded(lambda: gpt.Block(h, heads)).to(device())) for _ in range(2)]
    store, x = HostStore(), gpt.numbers(b, s, h).to(device()).requires_grad_()
    with MemoryMeter() as memory:
        y = x.clone()
        for block in blocks:
            y = partitioned_checkpoint(block, y, store=store)
        held = store.held_bytes
        # without a GPU host and device are one memory, so what lies in the store is taken off
        stays = memory.live["activations"] - y.nbytes - held
    y.sum().backward()
    return {"stays": stays, "out": store.to_host_bytes, "back": store.to_device_bytes, "held": held}


def seconds_and_bytes_of_a_sample(side: int, samples: int, computing_s: float) -> tuple[float, float]:
    """Seconds and sent bytes for each sample of a step; a wait of ``computing_s`` stands for its computation.

    There is one weight [side, side], so nothing travels while it computes. Collective.
    """
    net = nn.Linear(side, side, bias=False)
    model = BucketedDataParallel(PaddedModule(net, backward_s=samples * computing_s))
    taken = []
    for _ in range(2):
        dist.barrier()
        begin = time.perf_counter()
        with WireMeter() as wire:
            model(torch.ones(samples, side)).sum().backward()
            taken.append(time.perf_counter() - begin)
    return min(taken) / samples, wire.sent_bytes / samples
