"""The full layers that constructors take: what they may be, and that all ranks hold the same.

Ranks begin with different seeds, so a layer that each makes for itself is another one on each: cut to parts and put
together, these would give numbers that belong to no model, without a word. Constructors therefore compare checksums
(CRC-32, some 2 GB/s) in one small message; on a group of one, or on the meta device, nothing is compared.
"""

import time
import zlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from pardemo import compat
from pardemo.collectives.links import bytes_of
from pardemo.world.rank import device

#: Who has not come to make the same layer by then makes another one, or none.
MEETING_S = 120.0
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def linears(given: nn.Linear | Iterable[nn.Linear]) -> list[nn.Linear]:
    """One full layer, or several, as a list; TypeError where one is not computed as ``nn.Linear`` computes."""
    layers = list(given) if isinstance(given, Iterable) else [given]
    for layer in layers:
        check_plain(layer, nn.Linear)
        if tuple(layer.weight.shape) != (layer.out_features, layer.in_features):
            raise ValueError(
                f"the layer's weight has shape {tuple(layer.weight.shape)}, not "
                f"{(layer.out_features, layer.in_features)}: split it before ZeRO-3 or FSDP takes it apart"
            )
    return layers


def check_plain(layer: nn.Module, kind: type[nn.Module]) -> None:
    """TypeError where more, or something else, happens in the layer than ``kind`` does with its own weight."""
    name = f"{type(layer).__module__.split('.')[0]}'s {type(layer).__name__}"
    if isinstance(getattr(layer, "base_layer", None), nn.Module):
        raise TypeError(
            f"{name} is an adapter around a layer, of which the weight alone would be taken: merge it first "
            "(merge_and_unload), or split its base_layer"
        )
    if type(layer).__name__ == "Conv1D":
        raise TypeError(f"{name} keeps its weight as [in, out]: make an nn.Linear with the transposed weight of it")
    own_way = not isinstance(layer, kind) or type(layer).forward is not kind.forward or "forward" in vars(layer)
    if own_way:
        raise TypeError(f"{name} computes in a way of its own: give the plain nn.{kind.__name__} that it stands for")
    if parametrize.is_parametrized(layer):
        raise TypeError(f"{name}'s weight is computed from others: remove_parametrizations first")
    if any(getattr(layer, hooks) for hooks in _HOOKS):
        raise TypeError(f"{name} has hooks, which its part would not run: remove them first (weight_norm: its own)")
    for which, parameter in layer.named_parameters():
        if compat.backward_hooks(parameter) or compat.accumulate_hooks(parameter):
            raise TypeError(f"{name}'s {which} has hooks, which its part would not run: register them on the part")


def compare(
    what: str, tensors: Mapping[str, torch.Tensor | None], group: dist.ProcessGroup, **settings: object
) -> None:
    """Collective: all ranks are making the same layer from the same full tensors.

    Args:
        what: the class that is being made. tensors: parameters and buffers by name. settings: what else has to agree.

    Raises:
        ValueError: they are not; names the first tensor or the layers that differ, and the ranks.
        TimeoutError: some rank has not come within ``MEETING_S``.
    """
    present = {name: t for name, t in tensors.items() if t is not None}
    if group.size() == 1 or not present or any(t.is_meta for t in present.values()):
        return
    forms = [
        f"{name} {str(t.dtype)[6:]} {tuple(t.shape)}{' trained' if t.requires_grad else ''}"
        for name, t in present.items()
    ]
    description = f"{what}({', '.join([*forms, *(f'{key}={value}' for key, value in settings.items())])})"
    with compat.without_modes():  # meters: the caller did not ask for these messages
        sums = [zlib.crc32(bytes_of(t.detach().contiguous().cpu())) for t in present.values()]
        mine = torch.tensor([zlib.crc32(text.encode()) for text in (description, repr(sums))], device=device())
        table = [torch.empty_like(mine) for _ in range(group.size())]
        _meet(table, mine, group, what)
        if all(torch.equal(row, table[0]) for row in table):
            return
        all_of_them: list = [None] * group.size()
        dist.all_gather_object(all_of_them, (description, sums), group=group)
    _name_the_difference(what, forms, all_of_them)


def _name_the_difference(what: str, forms: list[str], all_of_them: list[tuple[str, list[int]]]) -> NoReturn:
    first, sums = all_of_them[0]
    for rank, (theirs, _) in enumerate(all_of_them):
        if theirs != first:
            raise ValueError(f"the ranks make different layers: rank 0 {first}, rank {rank} {theirs}")
    rank, which = next(
        (rank, forms[at]) for rank, (_, their) in enumerate(all_of_them) for at, a in enumerate(sums) if a != their[at]
    )
    raise ValueError(
        f"{what}: the full layer's {which} has other values on rank {rank} of the group than on rank 0: make it from "
        "one seed on all ranks, or broadcast it from one of them"
    )


def values_of(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers, for :func:`compare`."""
    return {f"{name}.{n}": t for n, t in (*module.named_parameters(), *module.named_buffers())}


def refuse_together(what: str, objection: str | None, group: dist.ProcessGroup) -> None:
    """Collective: a ValueError on all ranks where one of them objects; without it the others would wait for that rank.

    Raises:
        ValueError: the first rank's objection. TimeoutError: some rank has not come within ``MEETING_S``.
    """
    if group.size() > 1:
        with compat.without_modes():
            mine = torch.tensor([objection is not None], dtype=torch.uint8, device=device())
            table = [torch.empty_like(mine) for _ in range(group.size())]
            _meet(table, mine, group, what)
            if not any(table):
                return
            objections: list = [None] * group.size()
            dist.all_gather_object(objections, objection, group=group)
        objection = next(filter(None, objections))
    if objection is not None:
        raise ValueError(objection)


def _meet(table: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup, what: str) -> None:
    began = time.monotonic()
    work = dist.all_gather(table, mine, group=group, async_op=True)
    try:
        work.wait(timedelta(seconds=MEETING_S))
    except RuntimeError as reason:
        if time.monotonic() - began < MEETING_S:
            raise ConnectionError(f"{what}: another rank of its group is gone ({reason})") from None
        raise TimeoutError(
            f"{what}: after {MEETING_S:g} s not all ranks of its group were making it: every rank makes the same "
            "layers in the same order"
        ) from None
