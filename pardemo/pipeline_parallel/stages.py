"""Cutting a list of layers into stages."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn


def cut_by_layers(layers: Sequence[nn.Module], stages: int) -> list[nn.Sequential]:
    """Stages of equally many layers; where they do not divide, the first ones have one more.

    Raises:
        ValueError: fewer layers than stages, or no stage.
    """
    _check(layers, stages)
    each, more = divmod(len(layers), stages)
    return _build(layers, [each + (stage < more) for stage in range(stages)])


def cut_by_parameters(layers: Sequence[nn.Module], stages: int) -> list[nn.Sequential]:
    """Stages whose largest has as few parameters as any cut of the list allows.

    Raises:
        ValueError: fewer layers than stages, or no stage.
    """
    _check(layers, stages)
    return _build(layers, balance([sum(p.numel() for p in layer.parameters()) for layer in layers], stages))


def balance(sizes: Sequence[int], parts: int) -> list[int]:
    """How many of ``sizes`` go into each part, in their order, none empty, so that the largest sum is smallest."""
    until = [0, *accumulate(sizes)]
    # best[n] = (largest sum, the parts' lengths) of the first n sizes cut into as many parts as the rounds so far
    best = {n: (until[n], [n]) for n in range(1, len(sizes) + 1)}
    for part in range(1, parts):
        best = {
            n: min((max(best[k][0], until[n] - until[k]), [*best[k][1], n - k]) for k in range(part, n))
            for n in range(part + 1, len(sizes) + 1)
        }
    return best[len(sizes)][1]


def _check(layers: Sequence[nn.Module], stages: int) -> None:
    if not 1 <= stages <= len(layers):
        raise ValueError(f"{len(layers)} layers are cut into 1 to {len(layers)} stages, not {stages}")


def _build(layers: Sequence[nn.Module], lengths: Sequence[int]) -> list[nn.Sequential]:
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise([0, *accumulate(lengths)])]
