"""Random numbers on activations that all ranks hold: every rank would draw others, and the ranks' activations part.

Outside of an attention's heads and an MLP's columns every tensor-parallel rank computes the same:

    rank 0   x -> norm -> [ own heads: own random numbers ] -> sum -> drop path -> x'
    rank 1   x -> norm -> [ own heads: own random numbers ] -> sum -> drop path -> x'   must be the same x'

Dropout modules there are refused when a block is made; drop path, RReLU and functions of dropout are seen here by what
they do: the state of the random number generators moves.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from pardemo import compat

P = ParamSpec("P")
R = TypeVar("R")
_watches: "list[_Watch]" = []


def random_states(device: torch.device) -> tuple:
    """The states of torch's and Python's generators: who draws moves them."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return random.getstate(), *(state.numpy().tobytes() for state in states)


class _Watch:
    def __init__(self, device: torch.device):
        self.device, self.moved = device, False
        self.go_on()

    def look(self) -> None:
        self.moved = self.moved or random_states(self.device) != self.states

    def go_on(self) -> None:
        self.states = random_states(self.device)


@contextmanager
def refuse_draws(name: str, module: nn.Module, device: torch.device) -> Iterator[None]:
    """ValueError where the body draws random numbers, but for what :func:`own_draws` runs."""
    watch = _Watch(device)
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.pop()
    watch.look()
    if watch.moved:
        raise ValueError(
            f"{name}, a {type(module).__name__}, draws random numbers (drop path, RReLU, F.dropout), and every rank "
            "would draw others for tokens that all hold: put dropout into the attention's core or the activation, or "
            "use sequence_parallel=True"
        )


def own_draws(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """``function(*args)`` on what this rank alone computes: it may draw random numbers."""
    if not _watches:
        return function(*args, **kwargs)
    _watches[-1].look()
    try:
        return function(*args, **kwargs)
    finally:
        _watches[-1].go_on()


def refuse_mixed_tokens(name: str, module: nn.Module) -> None:
    """ValueError for what needs the tokens of all ranks, where each has its own: batch norm, drop path."""
    for part in module.modules():
        kind = type(part).__name__
        if isinstance(part, compat.NormBase):
            raise ValueError(
                f"{name}: {kind} would take its statistics from this rank's tokens alone: use a norm of each token, "
                "such as LayerNorm, or sequence_parallel=False"
            )
        if kind.endswith("DropPath") or kind == "StochasticDepth":
            raise ValueError(
                f"{name}: {kind} would drop a sample's path for some of its tokens and keep it for others: every rank "
                "has other tokens of the same sample, and draws for itself"
            )
