"""One transformer block on a group of ranks, ours and the libraries', compared with the plain one."""

from typing import NamedTuple

import torch
from torch import nn

from pardemo.meters import CallMeter, MemoryMeter, WireMeter
from pardemo.peers.cut_layers import cut_layer, to_local
from pardemo.small_models import gpt
from pardemo.world.rank import device


class Comparison(NamedTuple):
    """One rank's block compared with the plain one.

    Attributes:
        error: the largest relative error of the output, the input's gradient and this rank's parts of the weights'.
        sent_bytes: of a forward and a backward pass. calls: collectives in the two.
        parameter_bytes: of the parameters on this rank. kept_bytes: of the activations kept for the backward pass.
    """

    error: float
    sent_bytes: int
    calls: int
    parameter_bytes: int
    kept_bytes: int


def compare(library: str, batch: int, sequence: int, hidden: int, heads: int) -> Comparison:
    """The block of a library of :func:`pardemo.peers.cut_layers.cut_layer`, or the plain one, whole on every rank, for
    the name "plain, not cut". Collective."""
    block = gpt.seeded(lambda: gpt.Block(hidden, heads)).to(device())
    x = gpt.numbers(batch, sequence, hidden, seed=1).to(device())
    expected = gpt.output_and_input_gradient(block, x)
    if library == "plain, not cut":
        return _comparison(block, x, 0.0)
    with cut_layer(library, block) as (layer, turn, weights_error):
        results = map(turn, gpt.output_and_input_gradient(layer, turn(x)))
        return _comparison(layer, turn(x), max(weights_error(), *map(gpt.relative_error, results, expected)))


def _comparison(layer: nn.Module, x: torch.Tensor, error: float) -> Comparison:
    held = sum(to_local(p).nbytes for p in layer.parameters())
    return Comparison(error, *_sent(layer, x), held, _kept_bytes(layer, x))


def _sent(layer: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    x = x.detach().clone().requires_grad_()
    layer(x).sum().backward()  # opens the connections
    with WireMeter() as wire, CallMeter() as calls:
        layer(x).sum().backward()
    return wire.sent_bytes, sum(calls.counts.values())


def _kept_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    x = x.detach().clone().requires_grad_()
    with MemoryMeter(layer) as memory:
        y = layer(x)
        kept_bytes = memory.live["activations"]
    del y
    return kept_bytes
