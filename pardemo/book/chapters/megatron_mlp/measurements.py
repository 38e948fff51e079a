"""One MLP on a group of ranks, ours and the libraries', compared with the plain one: error, bytes sent, FLOPs."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from pardemo.meters import CallMeter, WireMeter
from pardemo.meters.timeline import Span, begun_before_end
from pardemo.peers.cut_layers import cut_layer
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
    """The MLP of a library of :func:`pardemo.peers.cut_layers.cut_layer` on all ranks. Collective."""
    mlp = gpt.seeded(lambda: gpt.MLP(hidden)).to(device())
    x = gpt.numbers(batch, sequence, hidden, seed=1).to(device())
    expected = gpt.output_and_input_gradient(mlp, x)
    with cut_layer(library, mlp) as (layer, turn, weights_error):
        results = map(turn, gpt.output_and_input_gradient(layer, turn(x)))
        error = max(weights_error(), *map(gpt.relative_error, results, expected))
        return Comparison(error, *_sent(layer, turn(x)), _share_of_flops(layer, turn(x), mlp, x))


def worst(of_ranks: Sequence[Comparison]) -> tuple[float, int, dict[str, int], float]:
    """Returns, of all ranks, the largest error, the most bytes, the all-reduces of one, the largest share of the
    FLOPs."""
    errors, sent, calls, shares = zip(*of_ranks, strict=True)
    return max(errors), max(sent), calls[0], max(shares)


def overlapped(
    passes: Sequence[Mapping[bool, Sequence[Sequence[Span]]]],
) -> tuple[dict[bool, int], dict[bool, Sequence[Span]], float]:
    """Compares backward passes without and with overlap.

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
