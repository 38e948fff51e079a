"""A toy task for *The cluster* that needs all ranks: each rank's inputs come from its own corner of the space."""

from collections.abc import Callable
from typing import NamedTuple

import torch

WIDTH, INPUTS, CORNERS = 128, 32, 4


class Task(NamedTuple):
    """A regression task.

    Attributes:
        weights: the network's initial weights, one vector. answer: the function to learn.
        corners: [rank, :data:`INPUTS`], the mean of each rank's inputs. test: inputs from all corners.
    """

    weights: torch.Tensor
    answer: Callable[[torch.Tensor], torch.Tensor]
    corners: torch.Tensor
    test: torch.Tensor


def task() -> Task:
    """The task, the same on every rank."""
    numbers = torch.Generator().manual_seed(0)
    fan_in = torch.tensor([INPUTS] * INPUTS * WIDTH + [WIDTH] * (WIDTH * WIDTH + WIDTH))
    weights = torch.randn(len(fan_in), generator=numbers) / fan_in.sqrt()
    teacher = torch.randn(INPUTS, 64, generator=numbers) / 4
    corners = 1.5 * torch.randn(CORNERS, INPUTS, generator=numbers)
    test = corners.repeat_interleave(512, 0) + torch.randn(512 * CORNERS, INPUTS, generator=numbers)
    return Task(weights, lambda x: torch.tanh(x @ teacher).mean(-1) * 4, corners, test)


def network(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Two hidden layers of :data:`WIDTH` without biases; all weights stand in one vector."""
    first, second, last = weights.split([INPUTS * WIDTH, WIDTH * WIDTH, WIDTH])
    x = torch.tanh(torch.tanh(x @ first.view(INPUTS, WIDTH)) @ second.view(WIDTH, WIDTH))
    return x @ last


def loss(weights: torch.Tensor, x: torch.Tensor, answer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The mean squared error of the network's answers."""
    return (network(weights, x) - answer(x)).square().mean()
