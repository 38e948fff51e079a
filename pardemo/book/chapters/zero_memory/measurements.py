"""Measures what frameworks' ranks keep between backward and step for one stack of layers: bytes for each parameter."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo.groups import Groups, ParallelDims
from pardemo.meters.memory_timeline import MemoryTimeline
from pardemo.meters.tensors import storage_bytes
from pardemo.peers import states
from pardemo.peers.deepspeed import engine as deepspeed
from pardemo.peers.pytorch import fsdp
from pardemo.small_models import gpt
from pardemo.world.rank import device
from pardemo.zero import Zero1, Zero2, Zero3


def stack(width: int, depth: int) -> nn.Sequential:
    """Linear layers without biases, the same on every rank."""
    return gpt.linear_stack(width, depth).to(device())


def by_deepspeed(width: int, depth: int, stage: int, **zero: Any) -> dict:
    """Bytes for each parameter by kind, and ``others``; ``zero`` are keys of ``zero_optimization``."""
    x = gpt.numbers(8, width, dtype=torch.bfloat16).to(device())
    before = storage_bytes(states.alive())
    engine = deepspeed.engine(stack(width, depth), deepspeed.zero_settings(stage, **zero))
    for step in range(3):
        engine.backward(engine(x).square().mean())
        if step < 2:
            engine.step()
    bytes_by_kind = states.by_kind(deepspeed.states(engine), before)
    deepspeed.close(engine)
    return {kind: nbytes / (depth * width**2) for kind, nbytes in bytes_by_kind.items()}


def by_fsdp(width: int, depth: int) -> dict[str, float]:
    """The same under FSDP2, each layer a unit."""
    x = gpt.numbers(8, width).to(device())
    before = storage_bytes(states.alive())
    net = fsdp.shard(stack(width, depth))
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(3):
        net(x).square().mean().backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    bytes_by_kind = states.by_kind(fsdp.states(net, optimizer), before)
    return {kind: nbytes / (depth * width**2) for kind, nbytes in bytes_by_kind.items()}


def by_package(start: torch.Tensor, width: int, samples: Callable[[int], torch.Tensor], stage: int,
               group: dist.ProcessGroup, steps: int = 4) -> tuple[float, torch.Tensor]:  # fmt: skip
    """pardemo's own ZeRO on the same stack with a tanh behind each layer: bytes for each parameter, and how they move.

    Args:
        start: all parameters, one layer after the other. samples: step -> this rank's inputs.
    """
    layers = [nn.Linear(width, width, bias=False) for _ in range(start.numel() // width**2)]
    net = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())]).to(start.device, start.dtype)
    nn.utils.vector_to_parameters(start.clone(), net.parameters())
    engine = (Zero1, Zero2, Zero3)[stage - 1](net, lambda shards: torch.optim.AdamW(shards, lr=1e-3), group)
    for step in range(steps):
        engine(samples(step)).square().mean().backward()
        state_bytes = sum(engine.state_bytes().values())
        engine.step()
    with engine.full_parameters():
        moved = nn.utils.parameters_to_vector(net.parameters()).detach() - start
    engine.close()
    return state_bytes / start.numel(), moved


def course(net: nn.Module, width: int) -> tuple[list[dict[str, int]], dict[str, int]]:
    """One training step of a net that has taken one before: a ``MemoryTimeline``'s states and marks."""
    x, adam = gpt.numbers(8, width).to(device()), torch.optim.AdamW(net.parameters(), fused=True)
    for _ in range(2):
        with MemoryTimeline(net, adam) as course:
            net(x).square().mean().backward()
            adam.step()
            adam.zero_grad()
    return course.states, course.marks


SAMPLES, LENGTH, VOCABULARY = 8, 17, 64


def alone(steps: int = 4) -> list[float]:
    """Losses of the whole model on the whole batch, in fp32, on every rank alike."""
    net = _model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _train(net, torch.Tensor.backward, update, slice(None), steps)


def together(stage: int, steps: int = 4) -> tuple[list[float], float]:
    """The losses, and the bytes of Adam's two means on this rank for each parameter that it has."""
    with Groups(ParallelDims.of_world(dist.get_world_size(), tp=2)) as groups:
        net = gpt.ParallelGPT(_model(), groups.tp)
        settings = deepspeed.zero_settings(stage, batch=4) | {"bf16": {"enabled": False}}
        settings["optimizer"]["params"]["weight_decay"] = 0.01  # torch's default
        engine = deepspeed.engine(net, settings, groups)
        part, rank = SAMPLES // groups.dp.size(), dist.get_rank(groups.dp)
        mine = slice(rank * part, (rank + 1) * part)
        losses = torch.tensor(_train(net, engine.backward, engine.step, mine, steps))
        dist.all_reduce(losses, group=groups.dp)
        moments = [v for s in engine.optimizer.optimizer.state.values() for v in s.values() if v.dim()]
        each = sum(v.nbytes for v in moments) / sum(p.numel() for p in net.parameters())
        deepspeed.close(engine)
        return (losses / groups.dp.size()).tolist(), each


def _model() -> gpt.GPT:
    return gpt.seeded(lambda: gpt.GPT(vocabulary=VOCABULARY)).to(device())


def _train(net: gpt.GPT, backward: Callable, update: Callable, mine: slice, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = net.loss(gpt.text(SAMPLES, LENGTH, VOCABULARY, seed=step)[mine].to(device()))
        backward(loss)
        update()
        losses.append(loss.item())
    return losses
