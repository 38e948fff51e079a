"""One MLP on a group of ranks, ours and the libraries', compared with the plain one: error, bytes sent, FLOPs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from pardemo.collectives import ring_all_gather, ring_reduce_scatter
from pardemo.meters import CallMeter, WireMeter
from pardemo.small_models import gpt
from pardemo.world.rank import device


class Comparison(NamedTuple):
    """One rank's MLP compared with the plain one.

    Attributes:
        error: the largest relative error of the output, the input's gradient and this rank's parts of the weights'.
        sent_bytes: of a forward and a backward pass. calls: all-reduces in each of the two.
        share_of_flops: this rank's floating-point operations over the plain MLP's.
    """

    error: float
    sent_bytes: int
    calls: dict[str, int]
    share_of_flops: float


def ours(batch: int, sequence: int, hidden: int) -> Comparison:
    """:class:`pardemo.tensor_parallel.ParallelMLP` on all ranks, from the same weights as the plain one. Collective."""
    mlp, x = _plain(batch, sequence, hidden)
    expected, gradient = _both_ways(mlp, x)
    parts = gpt.parallel_mlp(mlp)
    output, input_gradient = _both_ways(parts, x)
    truth = dict(gpt.parallel_mlp(gpt.gradients_as_weights(mlp)).named_parameters())
    weights_error = gpt.largest_error(gpt.gradients(parts), truth)
    error = max(gpt.relative_error(output, expected), gpt.relative_error(input_gradient, gradient), weights_error)
    return Comparison(error, *_sent(parts, x), _share_of_flops(parts, x, mlp, x))


def megatron(batch: int, sequence: int, hidden: int) -> Comparison:
    """The same by Megatron-core's layers."""
    return _theirs("megatron", batch, sequence, hidden)


def dtensor(batch: int, sequence: int, hidden: int) -> Comparison:
    """The same by torch's ColwiseParallel and RowwiseParallel."""
    return _theirs("dtensor", batch, sequence, hidden)


def _theirs(library: str, batch: int, sequence: int, hidden: int) -> Comparison:
    from pardemo.peers import megatron
    from pardemo.peers.pytorch import dtensor

    peer = {"megatron": megatron, "dtensor": dtensor}[library]
    mlp, x = _plain(batch, sequence, hidden)
    expected, gradient = _both_ways(mlp, x)
    with megatron.megatron(tp=dist.get_world_size()):
        if library == "megatron":  # lays activations out as [sequence, batch, hidden]
            turn, layer = _turned, peer.MLP(mlp)
            truth = dict(gpt.parallel_mlp(gpt.gradients_as_weights(mlp)).named_parameters())
        else:
            turn, layer, truth = _same, peer.mlp(mlp, peer.mesh(dist.get_world_size())), gpt.gradients(mlp)
        output, input_gradient = _both_ways(layer, turn(x))
        weights_error = gpt.largest_error(peer.gradients(layer), truth)
        error = max(
            gpt.relative_error(turn(output), expected),
            gpt.relative_error(turn(input_gradient), gradient),
            weights_error,
        )
        return Comparison(error, *_sent(layer, turn(x)), _share_of_flops(layer, turn(x), mlp, x))


def halves(numel: int) -> dict[str, int]:
    """Bytes that this rank sends in each half of a ring all-reduce of ``numel`` fp32 numbers, and in the backend's own
    reduce-scatter. Collective."""
    whole = torch.ones(numel, device=device())
    shard = torch.ones(numel // dist.get_world_size(), device=device())
    actions: dict[str, Callable[[], object]] = {
        "reduce-scatter": lambda: ring_reduce_scatter(whole),
        "all-gather": lambda: ring_all_gather(shard),
        "the backend's reduce-scatter": lambda: dist.reduce_scatter_single(torch.empty_like(shard), whole),
    }
    sent_bytes = {}
    for name, action in actions.items():
        action()  # opens the connections
        with WireMeter() as wire:
            action()
        sent_bytes[name] = wire.sent_bytes
    return sent_bytes


def _plain(batch: int, sequence: int, hidden: int) -> tuple[gpt.MLP, torch.Tensor]:
    """The same weights and tokens on every rank, although the ranks' generators are seeded differently."""
    mlp = gpt.seeded(lambda: gpt.MLP(hidden)).to(device())
    return mlp, gpt.numbers(batch, sequence, hidden, seed=1).to(device())


def _both_ways(layer: Callable, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward and a backward pass: the output and the input's gradient; the weights' gradients are set anew."""
    if isinstance(layer, torch.nn.Module):
        layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) / 1024)
    return y.detach(), x.grad


def _sent(layer: Callable, x: torch.Tensor) -> tuple[int, dict[str, int]]:
    x = x.detach().clone().requires_grad_()
    with WireMeter() as wire:
        with CallMeter() as forward:
            loss = layer(x).sum()
        with CallMeter() as backward:
            loss.backward()
    calls = {"forward": sum(forward.counts.values()), "backward": sum(backward.counts.values())}
    return wire.sent_bytes, calls


def _share_of_flops(layer: Callable, mine: torch.Tensor, mlp: Callable, x: torch.Tensor) -> float:
    with FlopCounterMode(display=False) as part:
        _both_ways(layer, mine)
    with FlopCounterMode(display=False) as whole:
        _both_ways(mlp, x)
    return part.get_total_flops() / whole.get_total_flops()


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous()


def _same(x: torch.Tensor) -> torch.Tensor:
    return x
