"""The small model and data that data-parallel variants are compared on, and its training in one process."""

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

FEATURES, CLASSES = 64, 10


def model(width: int = 256, layers: int = 4, seed: int = 0) -> nn.Sequential:
    """An MLP classifier with the same weights whatever state the rank's generator is in."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *blocks, nn.Linear(width, CLASSES))


def batch(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [samples, 64] and the classes [samples] that a fixed linear teacher gives them."""
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(12345))
    inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs @ teacher).argmax(1)


def shard(samples: int, rank: int, size: int) -> slice:
    """The rank's equal part of a batch; ValueError when the batch does not divide."""
    if samples % size:
        raise ValueError(f"a batch of {samples} does not divide into {size} equal shards")
    part = samples // size
    return slice(rank * part, (rank + 1) * part)


def train(
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module, steps: int = 5, samples: int = 48
) -> tuple[list[float], torch.Tensor]:
    """Trains for some steps on this rank's shard (of the whole batch outside a group).

    48 samples divide by 2, 3, 4, 6 and 8 ranks.

    Returns: the losses of the whole batch, and all parameters as one flat tensor on the CPU.
    """
    from pardemo.world.rank import device

    inside = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if inside else (0, 1)
    net = wrap(model().to(device()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, classes = (t[shard(samples, rank, size)].to(device()) for t in batch(samples, seed=step))
        loss = nn.functional.cross_entropy(net(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if inside:
            dist.all_reduce(mean)
        losses.append(mean.item() / size)
    return losses, torch.cat([p.detach().flatten().cpu() for p in net.parameters()])


def digest(parameters: torch.Tensor) -> str:
    """A fingerprint of the exact bits."""
    return hashlib.sha256(parameters.contiguous().numpy().tobytes()).hexdigest()[:16]


def train_bucketed() -> dict:
    """Trains by the ring in a job (``python -m pardemo.world pardemo.small_models.classifier:train_bucketed``)."""
    from pardemo.data_parallel import BucketedDataParallel

    losses, parameters = train(BucketedDataParallel)
    return {"ranks": dist.get_world_size(), "losses": losses, "digest": digest(parameters)}
