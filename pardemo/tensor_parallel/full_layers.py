"""The full layers that constructors take: what they may be, and that all ranks hold the same.

Ranks begin with different seeds, so a layer that each makes for itself is another one on each: cut to parts and put
together, these would give numbers that belong to no model, without a word. Constructors therefore compare checksums
(CRC-32, some 2 GB/s) in one small message; on a group of one, or on the meta device, nothing is compared.
"""

import zlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from pardemo.collectives.agreement import compare_lines
from pardemo.collectives.links import bytes_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def linears(given: nn.Linear | Iterable[nn.Linear]) -> list[nn.Linear]:
    """One full layer, or several that share their input, as a list.

    Raises:
        TypeError: see :func:`check_plain`. ValueError: of several, not all have a bias, one dtype, or are trained.
    """
    layers = list(given) if isinstance(given, Iterable) else [given]
    for layer in layers:
        check_plain(layer, nn.Linear)
    kinds = {(x.bias is None, x.weight.dtype, *(p.requires_grad for p in x.parameters())) for x in layers}
    if len(kinds) != 1:
        raise ValueError("layers that share their input need one dtype, all a bias or none, and be trained alike")
    return layers


def check_plain(layer: nn.Module, kind: type[nn.Module]) -> None:
    """TypeError where a layer does more, or something else, than ``kind`` does with its own weight (an adapter, a
    transposed or quantised weight, weight norm, a hook): a part of its weight would not be a part of what it does."""
    own_way = not isinstance(layer, kind) or type(layer).forward is not kind.forward or "forward" in vars(layer)
    if own_way or parametrize.is_parametrized(layer) or any(getattr(layer, hooks) for hooks in _HOOKS):
        raise TypeError(
            f"{type(layer).__module__.split('.')[0]}'s {type(layer).__name__} does not compute what a plain nn."
            f"{kind.__name__} does, or has hooks: merge its adapter, or give the nn.{kind.__name__} that it stands for"
        )


def compare_layers(
    layer: str, tensors: Mapping[str, torch.Tensor | None], group: dist.ProcessGroup, **settings: object
) -> None:
    """Collective: all ranks are making the same layer from the same full tensors.

    Args:
        layer: the class that is being made. tensors: parameters and buffers by name.
        settings: further values that have to agree.

    Raises:
        ValueError: they are not; names the first setting or tensor that differs, and the ranks.
    """
    present = {name: t for name, t in tensors.items() if t is not None}
    if group.size() == 1 or any(t.is_meta for t in present.values()):
        return
    lines = [layer, *(f"{name}={value}" for name, value in settings.items())]
    for name, t in present.items():
        lines.append(f"{name} {str(t.dtype)[6:]} {tuple(t.shape)}{' trained' if t.requires_grad else ''}")
    for name, t in present.items():
        lines.append(f"{name} with checksum {zlib.crc32(bytes_of(t.detach().contiguous().cpu())):08x}")
    compare_lines(f"{layer} needs the same full layer on all ranks: one seed, or a broadcast", lines, group)


def values_of(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers, for :func:`compare_layers`."""
    return {f"{name}.{n}": t for n, t in (*module.named_parameters(), *module.named_buffers())}
