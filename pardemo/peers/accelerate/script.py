"""The Accelerate script on a World's ranks, as ``accelerate launch`` would start it: losses, bytes, states."""

import contextlib
import gc
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from pardemo.peers.accelerate import training as accelerate
from pardemo.peers.accelerate.scripts import train_accelerate


def train(environment: Mapping[str, str], expected: Mapping[str, Any], *arguments: str) -> list[float]:
    """A World's rank trains by the Accelerate script with these arguments; the loss of each step.

    Raises:
        RuntimeError: another configuration runs than the expected one.
    """
    with accelerate.as_launched(environment):
        steps = list(train_accelerate.train(train_accelerate.parse(list(arguments))))
        model = steps[-1][0]
        accelerate.assert_runs(accelerate.what_runs(model), expected)
        _end(model)
    return [loss for *_, loss in steps]


def measure(environment: Mapping[str, str], expected: Mapping[str, Any], *arguments: str) -> dict[str, Any]:
    """Trains as :func:`train` does, for at least three steps; returns losses, bytes sent in the last step, bytes kept
    by kind.

    ``sent_bytes`` are the kernel's count where it counts, ``ring_bytes`` what the collectives that were called send on
    rings, as nccl has them. States are counted between the backward pass and the update, when all of them are there.
    """
    from pardemo.meters import WireMeter
    from pardemo.meters.tensors import storage_bytes
    from pardemo.peers import states

    before, kept = storage_bytes(states.alive()), {}
    with accelerate.as_launched(environment):
        options = train_accelerate.parse(list(arguments))
        steps, losses = train_accelerate.train(options), []
        for _ in range(options.steps - 1):
            model, optimizer, loss = next(steps)
            losses.append(loss)
        accelerate.assert_runs(accelerate.what_runs(model), expected)
        alone = contextlib.nullcontext()
        with (
            WireMeter(evidence="count") if dist.is_initialized() else alone as calls,
            WireMeter() if dist.is_initialized() else alone as wire,
            accelerate.before_update(model, lambda: kept.update(states.by_kind(_states(model, optimizer), before))),
        ):
            losses.append(next(steps)[2])
        parameters = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in model.parameters())
        steps.close()
        _end(model)
    return {"losses": losses, "kept": kept, "sent_bytes": wire.sent_bytes if wire else 0,
            "ring_bytes": calls.sent_bytes if calls else 0, "parameters": parameters,
            "evidence": wire.evidence if wire else ""}  # fmt: skip


def _states(model: nn.Module, optimizer: Any) -> dict[str, list]:
    if accelerate.wrapped(model) == "DeepSpeedEngine":
        from pardemo.peers.deepspeed import engine as deepspeed

        return deepspeed.states(model)
    from pardemo.peers.pytorch import fsdp

    return fsdp.states(model, optimizer)


def _end(model: nn.Module) -> None:
    if accelerate.wrapped(model) == "DeepSpeedEngine":
        from pardemo.peers.deepspeed import engine as deepspeed

        deepspeed.close(model)
    gc.collect()
