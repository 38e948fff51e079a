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
    each, more = divmod(len(layers), stages)
    ends = accumulate(each + (stage < more) for stage in range(stages))
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise([0, *ends])]


def _check(layers: Sequence[nn.Module], stages: int) -> None:
    if not 1 <= stages <= len(layers):
        raise ValueError(f"{len(layers)} layers are cut into 1 to {len(layers)} stages, not {stages}")


def _build(layers: Sequence[nn.Module], lengths: Sequence[int]) -> list[nn.Sequential]:
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise([0, *accumulate(lengths)])]
