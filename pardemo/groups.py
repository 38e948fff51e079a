"""Makes the process groups of a layout, and marks parameters that are cut over one.

Ranks are numbered so that the first axis of ``order`` runs fastest. With Megatron-core's order, tp-cp-ep-dp-pp, the
ranks of a tensor-parallel group are neighbours, so that they sit in one host (Narayanan et al. 2021, arXiv 2104.04473,
3).

A layer that keeps a part of a parameter marks it (:func:`mark_cut`). Whoever gives ranks one rank's values, averages
gradients over ranks, or takes a norm over them, reads the mark (:func:`cut_of`).
"""

import weakref
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from pardemo import argument_checks, compat

if TYPE_CHECKING:
    from torch import nn

AXES = ("tp", "cp", "ep", "dp", "pp")

#: A parameter of which other ranks have a copy, and the group of all that have one.
Tied = tuple["nn.Parameter", dist.ProcessGroup]


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The sizes of five dimensions of parallelism, and how their tp × cp × ep × dp × pp ranks are numbered.

    ``tp`` ranks share each layer, ``cp`` ranks each sequence, ``ep`` ranks a layer's experts, ``pp`` ranks the layers;
    ``dp`` replicas see different data. With experts the dense layers have ``groups("ep-dp")`` as replicas, and the
    experts ``groups("dp")``. Megatron-core makes two layouts of the same ranks instead, one of dense layers (ep 1) and
    one of experts (cp 1, another tp): two of these.

    Args:
        order: the axes, the fastest first; those of one rank may be left out.

    Raises:
        ValueError: a size below 1, or an order that leaves an axis out or names one twice.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = "-".join(AXES)

    def __post_init__(self) -> None:
        for axis in AXES:
            argument_checks.whole_number(getattr(self, axis), axis)
        named, needed = self.order.split("-"), {axis for axis in AXES if getattr(self, axis) > 1}
        if len(set(named)) < len(named) or not needed <= set(named) <= set(AXES):
            raise ValueError(
                f"order must name {', '.join(sorted(needed, key=AXES.index)) or 'an axis'} once each, such as "
                f"{'-'.join(AXES)}, not {self.order!r}"
            )

    @classmethod
    def of_world(
        cls, ranks: int, *, tp: int = 1, cp: int = 1, ep: int = 1, pp: int = 1, order: str = "-".join(AXES)
    ) -> "ParallelDims":
        """Makes what the other axes leave of ``ranks`` data parallel; ValueError when that does not divide."""
        replica = tp * cp * ep * pp
        if min(ranks, tp, cp, ep, pp) < 1 or ranks % replica:
            raise ValueError(
                f"{ranks} ranks do not divide into replicas of tp {tp} × cp {cp} × ep {ep} × pp {pp} = {replica}"
            )
        return cls(tp=tp, cp=cp, ep=ep, dp=ranks // replica, pp=pp, order=order)

    @property
    def size(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place on each axis, e.g. ``{"tp": 1, "cp": 0, "ep": 0, "dp": 0, "pp": 3}``."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not one of the {self.size} ranks 0 to {self.size - 1}")
        coordinates = dict.fromkeys(AXES, 0)
        for axis in self.order.split("-"):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return coordinates

    def rank(self, **coordinates: int) -> int:
        """The number of the rank at these coordinates; axes that are left out are 0."""
        for axis, at in coordinates.items():
            if not 0 <= at < getattr(self, axis):
                raise ValueError(f"{axis} {at} is not one of 0 to {getattr(self, axis) - 1}")
        number, stride = 0, 1
        for axis in self.order.split("-"):
            number += coordinates.get(axis, 0) * stride
            stride *= getattr(self, axis)
        return number

    def groups(self, axes: str) -> list[list[int]]:
        """All groups of ranks that differ along ``axes`` only (``"tp"``, ``"dp"``, or ``"tp-pp"``: model parallel).

        Ranks ascend in each group, groups by their first rank.
        """
        named = axes.split("-")
        if unknown := set(named) - set(AXES):
            raise ValueError(f"no axis {', '.join(sorted(unknown))}; there are: {', '.join(AXES)}")
        if len(set(named)) < len(named):
            raise ValueError(f"each axis once, not {axes!r}")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coordinates = self.coordinates(rank)
            members.setdefault(tuple(coordinates[axis] for axis in AXES if axis not in named), []).append(rank)
        return list(members.values())


class Groups:
    """The process groups of a layout, as a context manager: this rank's own are ``groups.tp``, ``.cp``, ``.ep`` ….

    >>> with Groups(ParallelDims(tp=2, dp=2)) as groups:           # doctest: +SKIP
    ...     model = BucketedDataParallel(split(model, groups.tp), groups.dp)

    Collective: every rank of the job enters and leaves it. The groups end with the block, and layers built on them
    cannot be used after it.

    Args:
        joined: groups over several axes beside, such as "ep-dp", which is then ``groups["ep-dp"]``.

    Raises:
        ValueError: the sizes make another number of ranks than there are.
    """

    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    ep: dist.ProcessGroup
    dp: dist.ProcessGroup
    pp: dist.ProcessGroup

    def __init__(self, dims: ParallelDims, *joined: str):
        self.dims, self._axes = dims, (*AXES, *joined)
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def __enter__(self) -> "Groups":
        dims = self.dims
        if dist.get_world_size() != dims.size:
            sizes = " × ".join(f"{axis} {getattr(dims, axis)}" for axis in AXES if getattr(dims, axis) > 1)
            raise ValueError(f"{sizes or 'one rank'} is {dims.size} ranks, but there are {dist.get_world_size()}")
        created = {}
        for axes in self._axes:
            for ranks in map(tuple, dims.groups(axes)):
                if ranks not in created:  # axes of one rank share a group
                    created[ranks] = dist.new_group(list(ranks))  # by every rank for every group, as torch demands
                if dist.get_rank() in ranks:
                    self._by_ranks[ranks] = created[ranks]
                    setattr(self, axes, created[ranks])
        # gloo's ranks connect one by one: whoever left the block at once would hang up on one that still connects
        dist.barrier()
        return self

    def __getitem__(self, axes: str) -> dist.ProcessGroup:
        return getattr(self, axes)

    def __exit__(self, *error: object) -> None:
        for group in self._by_ranks.values():
            if (copied := _copies.pop(group, None)) is not None:
                dist.destroy_process_group(copied)
            dist.destroy_process_group(group)


@dataclass(frozen=True)
class Cut:
    """The cut of a parameter: the ranks of ``group`` together have all of it, each a part along ``dim``.

    Attributes:
        dim: None where each rank has whole parameters of its own, as of experts.
        counted: the elements, as (first, end), that no earlier rank of the group has too: a norm counts these.
    """

    group: dist.ProcessGroup
    dim: int | None
    counted: tuple[tuple[int, int], ...]

    def __reduce__(self) -> tuple:
        return type(None), ()  # in another process a parameter is cut over no group


def mark_cut(
    parameter: "nn.Parameter",
    group: dist.ProcessGroup,
    dim: int | None,
    counted: tuple[tuple[int, int], ...] | None = None,
) -> None:
    """Marks a parameter as this rank's part, along ``dim``, of one that ``group`` has; see :class:`Cut`.

    ``counted``: all elements when None. In a group of one nothing is cut.
    """
    if group.size() > 1:
        cut = Cut(group, dim, ((0, parameter.numel()),) if counted is None else counted)
        parameter._cut = cut  # type: ignore[attr-defined]


def cut_of(parameter: "nn.Parameter") -> Cut | None:
    """Returns how a parameter is cut; None where every rank has a replica of it."""
    return getattr(parameter, "_cut", None)


def cut_within(module: "nn.Module", group: dist.ProcessGroup) -> str:
    """Says why a group cannot hold replicas of this module: its ranks have different parts. Empty if it can."""
    ours = set(dist.get_process_group_ranks(group))
    for name, parameter in module.named_parameters():
        if cut := cut_of(parameter):
            ranks = dist.get_process_group_ranks(cut.group)
            if len(ours & set(ranks)) > 1:
                return (
                    f"{name} is cut over ranks {ranks}, and ranks {sorted(ours)} would be given one rank's part of it: "
                    "give the data-parallel group, whose ranks have the same part"
                )
    return ""


#: For each group the second one of its ranks.
_copies: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


def copy_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The second group of the same ranks, for messages that may not meet those of ``group``. Collective.

    It is made at the first call, and ends with the block of :class:`Groups` that has made ``group``.
    """
    if group not in _copies:
        name = f"{group.group_name}_copy"
        _copies[group] = compat.new_group_by_name(dist.get_process_group_ranks(group), name)
    return _copies[group]


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default group.

    Raises:
        RuntimeError: no process group. ValueError: this rank is not a member.
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError("no process group: call this inside World.run or after init_process_group")
        group = cast(dist.ProcessGroup, dist.group.WORLD)  # there is one, once it is initialized
    if dist.get_rank(group) < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not a member of the group that it was given")
    return group


def divide(total: int, group: dist.ProcessGroup, quantity: str) -> int:
    """Returns ``total`` over the ranks of ``group``.

    Raises:
        ValueError: it does not divide; names the quantity, the ranks and a total that would do.
    """
    ranks = group.size()
    if total % ranks:
        raise ValueError(
            f"{quantity} of {total} does not divide by the {ranks} ranks of the group; "
            f"{-(-total // ranks) * ranks} would"
        )
    return total // ranks
