"""Tensor parallelism inside pairs of ranks, DeepSpeed's ZeRO across the pairs; and the same training in one process."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.groups import Groups, ParallelDims
from pardemo.peers.deepspeed import engine as deepspeed
from pardemo.small_models import gpt
from pardemo.world.rank import device

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
