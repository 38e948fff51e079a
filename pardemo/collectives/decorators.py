"""Decorates functions that communicate: no compiler traces them, and they have a first derivative only."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as it is, also inside of ``torch.compile``, whose graph ends before it and goes on behind it.

    Dynamo cannot trace sockets. ``torch.compiler.disable`` would do the same, and load Dynamo (a second of every rank's
    start) where nobody compiles.
    """
    plain: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal plain
        if plain is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            plain = torch.compiler.disable(function)
        return plain(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "it is between the ranks: not with fullgraph=True"  # type: ignore[attr-defined]
    return call


def first_derivative_only(backward: Callable) -> Callable:
    """The ``backward`` of an autograd function; RuntimeError where a graph of it is wanted (``create_graph=True``).

    torch's ``once_differentiable`` raises where the graph is used, and not at all where the incoming gradient is a
    constant: the second derivative would then lack this layer's part, without a word.
    """

    @functools.wraps(backward)
    def call(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: layers that exchange have no second derivative; a gradient penalty needs the full "
                "model in one process"
            )
        return backward(ctx, *gradients)

    return call
