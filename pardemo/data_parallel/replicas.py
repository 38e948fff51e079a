"""The same model on every rank: compared before anything is exchanged."""

from collections.abc import Callable, Hashable
from itertools import zip_longest

import torch.distributed as dist
from torch import nn


def compare_models(
    module: nn.Module,
    group: dist.ProcessGroup,
    engine: str,
    problem: str | None = None,
    settings_of: Callable[[nn.Parameter], Hashable] | None = None,
) -> None:
    """All ranks need the same model: a difference would end in a hang, or in a wrong sum, much later. Collective.

    Args:
        engine: what keeps the module, with what has to be the same on every rank (``"ZeRO-2, max_norm 1.0"``).
        problem: what speaks against this module on this rank, so that all ranks refuse it together.
        settings_of: what of a parameter has to be the same beside its form, such as its optimizer's group.

    Raises:
        ValueError: the first problem, or the first difference; the same text on every rank.
    """
    ranks: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (engine, problem, _form(module, settings_of)), group=group)
    engines, problems, models = zip(*ranks, strict=True)
    for rank, theirs in enumerate(engines):
        if theirs != engines[0]:
            raise ValueError(f"the ranks' engines differ: rank 0 has {engines[0]}, rank {rank} has {theirs}")
    if any(problems):
        rank = next(rank for rank, found in enumerate(problems) if found)
        raise ValueError(problems[rank] if len(set(problems)) == 1 else f"rank {rank}: {problems[rank]}")
    for rank, theirs in enumerate(models):
        for here, there in zip_longest(models[0], theirs, fillvalue="nothing more"):
            if here != there:
                raise ValueError(f"the ranks' models differ: rank 0 has {here}, rank {rank} has {there}")


def _form(module: nn.Module, settings_of: Callable[[nn.Parameter], Hashable] | None) -> list[tuple]:
    form = []
    for name, p in module.named_parameters():
        strides = () if p.is_contiguous() else (f"strides {p.stride()}",)
        settings = () if settings_of is None else (settings_of(p),)
        form.append((name, tuple(p.shape), str(p.dtype), p.requires_grad, *strides, *settings))
    return form + [(name, tuple(b.shape), str(b.dtype), "a buffer") for name, b in module.named_buffers()]
