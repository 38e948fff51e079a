"""Cutting a list of layers into stages."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn


def cut_by_layers(layers: Sequence[nn.Module], stages: int) -> list[nn.Sequential]:
    """Stages of equally many layers; where they do not divide, the first ones have one more.

    Raises:
        ValueError: fewer layers than stages, or no stage.
    """
    if not 1 <= stages <= len(layers):
        raise ValueError(f"{len(layers)} layers are cut into 1 to {len(layers)} stages, not {stages}")
    per_stage, more = divmod(len(layers), stages)
    ends = accumulate(per_stage + (stage < more) for stage in range(stages))
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise([0, *ends])]


def balance(sizes: Sequence[float], parts: int) -> list[int]:
    """Cuts ``sizes``, in order, into parts with the smallest largest sum, none empty; returns the parts' lengths."""
    until = [0, *accumulate(sizes)]
    # best[n] = (largest sum, the parts' lengths) of the first n sizes cut into as many parts as the rounds so far
    best = {n: (until[n], [n]) for n in range(1, len(sizes) + 1)}
    for part in range(1, parts):
        best = {
            n: min((max(best[k][0], until[n] - until[k]), [*best[k][1], n - k]) for k in range(part, n))
            for n in range(part + 1, len(sizes) + 1)
        }
    return best[len(sizes)][1]
