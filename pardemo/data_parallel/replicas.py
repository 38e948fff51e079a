"""The same model on every rank: compared and sent from one rank at the start, and watched from then on."""

from collections.abc import Callable, Hashable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives.channel import Channel


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


def broadcast_buffers(module: nn.Module, channel: Channel, source: int = 0) -> None:
    """Rank ``source``'s buffers to all: packed, one message per dtype, since most are small."""
    kinds: dict[tuple, list[torch.Tensor]] = {}
    for buffer in module.buffers():
        kinds.setdefault((buffer.dtype, buffer.device), []).append(_each_once(buffer.detach()))
    for buffers in kinds.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        channel.broadcast(flat, source, "the buffers")
        if channel.rank != source:
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))


def broadcast_model(module: nn.Module, channel: Channel, source: int = 0) -> None:
    """Rank ``source``'s parameters and buffers to all."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            channel.broadcast(parameter.detach(), source, name)
        broadcast_buffers(module, channel, source)


class Watched:
    """What a module's parameters were when it was wrapped; :meth:`check` refuses what would not be averaged."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._kinds = {p: (p.requires_grad, p.dtype, p.device) for p in module.parameters()}

    def check(self) -> None:
        """ValueError where a parameter is new, trains though it was frozen, or was cast or moved.

        Takes about a microsecond per parameter.
        """
        for parameter in self._module.parameters():
            trained, dtype, device = self._kinds.get(parameter, (False, None, None))
            if parameter.requires_grad and not trained:
                raise ValueError(
                    f"{self.name_of(parameter)} requires a gradient, and did not when the module was wrapped: "
                    "it would not be averaged; unfreeze or add parameters before wrapping"
                )
            if trained and (parameter.dtype, parameter.device) != (dtype, device):
                raise ValueError(
                    f"{self.name_of(parameter)} was {dtype} on {device} when the module was wrapped and is "
                    f"{parameter.dtype} on {parameter.device} now: cast and move the module before wrapping"
                )

    def name_of(self, parameter: nn.Parameter) -> str:
        """The parameter's name in the module."""
        return next(name for name, p in self._module.named_parameters() if p is parameter)


def gaps(module: nn.Module) -> str | None:
    """What speaks against sending this module's parameters as they lie in memory."""
    for name, parameter in module.named_parameters():
        if not torch.ops.aten.is_non_overlapping_and_dense(parameter.data):
            return (
                f"{name}, {tuple(parameter.shape)} with strides {parameter.stride()}, has gaps or overlaps in memory: "
                "make it contiguous before wrapping"
            )
    return None


def _form(module: nn.Module, settings_of: Callable[[nn.Parameter], Hashable] | None) -> list[tuple]:
    form = []
    for name, p in module.named_parameters():
        strides = () if p.is_contiguous() else (f"strides {p.stride()}",)
        settings = () if settings_of is None else (settings_of(p),)
        form.append((name, tuple(p.shape), str(p.dtype), p.requires_grad, *strides, *settings))
    return form + [(name, tuple(b.shape), str(b.dtype), "a buffer") for name, b in module.named_buffers()]


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the dimensions that ``expand`` made: each element of its memory once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
