"""One MLP on a group of ranks, ours and the libraries', compared with the plain one: error, bytes sent, FLOPs."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from pardemo.meters import CallMeter, WireMeter
from pardemo.meters.timeline import Span, begun_before_end
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


def compare(library: str, batch: int, sequence: int, hidden: int) -> Comparison:
    """The MLP of ``library``, pardemo (:class:`pardemo.tensor_parallel.ParallelMLP`), Megatron-core or DTensor, on all
    ranks, from the same weights as the plain one. Collective."""
    if library != "pardemo":
        return _theirs({"Megatron-core": "megatron", "DTensor": "dtensor"}[library], batch, sequence, hidden)
    mlp, x = _plain(batch, sequence, hidden)
    expected, gradient = gpt.output_and_input_gradient(mlp, x)
    parts = gpt.parallel_mlp(mlp)
    output, input_gradient = gpt.output_and_input_gradient(parts, x)
    truth = dict(gpt.parallel_mlp(gpt.gradients_as_weights(mlp)).named_parameters())
    weights_error = gpt.largest_error(gpt.gradients(parts), truth)
    error = max(gpt.relative_error(output, expected), gpt.relative_error(input_gradient, gradient), weights_error)
    return Comparison(error, *_sent(parts, x), _share_of_flops(parts, x, mlp, x))


def _theirs(library: str, batch: int, sequence: int, hidden: int) -> Comparison:
    from pardemo.peers import megatron
    from pardemo.peers.pytorch import dtensor

    peer = {"megatron": megatron, "dtensor": dtensor}[library]
    mlp, x = _plain(batch, sequence, hidden)
    expected, gradient = gpt.output_and_input_gradient(mlp, x)
    with megatron.megatron(tp=dist.get_world_size()):
        if library == "megatron":  # lays activations out as [sequence, batch, hidden]
            turn, layer = _turned, peer.MLP(mlp)
            truth = dict(gpt.parallel_mlp(gpt.gradients_as_weights(mlp)).named_parameters())
        else:
            turn, layer, truth = _same, peer.mlp(mlp, peer.mesh(dist.get_world_size())), gpt.gradients(mlp)
        output, input_gradient = gpt.output_and_input_gradient(layer, turn(x))
        weights_error = gpt.largest_error(peer.gradients(layer), truth)
        error = max(
            gpt.relative_error(turn(output), expected),
            gpt.relative_error(turn(input_gradient), gradient),
            weights_error,
        )
        return Comparison(error, *_sent(layer, turn(x)), _share_of_flops(layer, turn(x), mlp, x))


def worst(of_ranks: Sequence[Comparison]) -> tuple[float, int, dict[str, int], float]:
    """Of all ranks: the largest error, the most bytes, the all-reduces of one, the largest share of the FLOPs."""
    errors, sent, calls, shares = zip(*of_ranks, strict=True)
    return max(errors), max(sent), calls[0], max(shares)


def overlapped(
    passes: Sequence[Mapping[bool, Sequence[Sequence[Span]]]],
) -> tuple[dict[bool, int], dict[bool, Sequence[Span]], float]:
    """Of backward passes without and with overlap: how it went.

    Args:
        passes: by rank, whether with overlap -> the noted times of each pass.

    Returns:
        Whether with overlap -> passes in which both multiplications began before the all-reduce had ended; and rank 0's
        quickest pass, the first one left out. The seconds that overlap saves of it.
    """
    early, best = {}, {}
    for overlap in (False, True):
        begun = [begun_before_end(spans, "compute", "communication") for by_way in passes for spans in by_way[overlap]]
        early[overlap] = begun.count(2)
        best[overlap] = min(passes[0][overlap][1:], key=_length_s)
    return early, best, _length_s(best[False]) - _length_s(best[True])


def _length_s(spans: Sequence[Span]) -> float:
    return max(span.end_s for span in spans) - min(span.begin_s for span in spans)


def _plain(batch: int, sequence: int, hidden: int) -> tuple[gpt.MLP, torch.Tensor]:
    """The same weights and tokens on every rank, although the ranks' generators are seeded differently."""
    mlp = gpt.seeded(lambda: gpt.MLP(hidden)).to(device())
    return mlp, gpt.numbers(batch, sequence, hidden, seed=1).to(device())


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
        gpt.output_and_input_gradient(layer, mine)
    with FlopCounterMode(display=False) as counter:
        gpt.output_and_input_gradient(mlp, x)
    return part.get_total_flops() / counter.get_total_flops()


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous()


def _same(x: torch.Tensor) -> torch.Tensor:
    return x
