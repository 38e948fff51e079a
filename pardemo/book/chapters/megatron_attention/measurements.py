"""One transformer block on a group of ranks, ours and the libraries', compared with the plain one."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pardemo.meters import CallMeter, MemoryMeter, WireMeter
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


def plain(batch: int, sequence: int, hidden: int, heads: int) -> Comparison:
    """The plain block, whole on every rank."""
    block, x = _plain(batch, sequence, hidden, heads)
    results = gpt.output_and_input_gradient(block, x)
    return _comparison(block, x, results, results, 0.0)


def ours(batch: int, sequence: int, hidden: int, heads: int) -> Comparison:
    """:class:`pardemo.tensor_parallel.ParallelBlock` on all ranks, from the plain block's weights. Collective."""
    block, x = _plain(batch, sequence, hidden, heads)
    expected = gpt.output_and_input_gradient(block, x)
    layer = gpt.parallel_block(block)
    results = gpt.output_and_input_gradient(layer, x)
    truth = dict(gpt.parallel_block(gpt.gradients_as_weights(block)).named_parameters())
    return _comparison(layer, x, expected, results, gpt.largest_error(gpt.gradients(layer), truth))


def megatron(batch: int, sequence: int, hidden: int, heads: int) -> Comparison:
    """The same by Megatron-core's TransformerLayer, which lays activations out as [sequence, batch, hidden]."""
    from pardemo.peers import megatron as peer

    block, x = _plain(batch, sequence, hidden, heads)
    expected = gpt.output_and_input_gradient(block, x)
    truth = dict(gpt.parallel_block(gpt.gradients_as_weights(block)).named_parameters())
    with peer.megatron(tp=dist.get_world_size()):
        layer, turned = peer.Block(block), _turned(x)
        results = tuple(_turned(t) for t in gpt.output_and_input_gradient(layer, turned))
        return _comparison(layer, turned, expected, results, gpt.largest_error(peer.gradients(layer), truth))


def dtensor(batch: int, sequence: int, hidden: int, heads: int) -> Comparison:
    """The same by a plan of torch's ColwiseParallel and RowwiseParallel."""
    from pardemo.peers.pytorch import dtensor as peer

    block, x = _plain(batch, sequence, hidden, heads)
    expected = gpt.output_and_input_gradient(block, x)
    layer = peer.block(block, peer.mesh(dist.get_world_size()))
    results = gpt.output_and_input_gradient(layer, x)
    return _comparison(layer, x, expected, results, gpt.largest_error(peer.gradients(layer), gpt.gradients(block)))


def _plain(batch: int, sequence: int, hidden: int, heads: int) -> tuple[gpt.Block, torch.Tensor]:
    """The same weights and tokens on every rank, although the ranks' generators are seeded differently."""
    block = gpt.seeded(lambda: gpt.Block(hidden, heads)).to(device())
    return block, gpt.numbers(batch, sequence, hidden, seed=1).to(device())


def _comparison(layer: nn.Module, x: torch.Tensor, expected: tuple, results: tuple, weights_error: float) -> Comparison:
    errors = [gpt.relative_error(result, reference) for result, reference in zip(results, expected, strict=True)]
    held = sum(_here(p).nbytes for p in layer.parameters())
    sent, calls = _sent(layer, x)
    return Comparison(max(*errors, weights_error), sent, calls, held, _kept_bytes(layer, x))


def _here(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


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


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous()
