"""Which ranks form a tensor-, data- or pipeline-parallel group.

Ranks are numbered so that the first axis of ``order`` runs fastest. With Megatron's order, tp-dp-pp, the ranks of a
tensor-parallel group are neighbours, so that they sit in one host (Narayanan et al. 2021, arXiv 2104.04473, 3).
"""

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

AXES = ("tp", "dp", "pp")


@dataclass(frozen=True)
class ParallelDims:
    """tp × dp × pp ranks. ``tp`` ranks share a layer, ``pp`` ranks the layers, ``dp`` copies see different data.

    Raises:
        ValueError: a size below 1, or an order that does not name each axis once.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = "tp-dp-pp"

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis} must be a whole number of at least 1, not {size!r}")
        if sorted(self.order.split("-")) != sorted(AXES):
            raise ValueError(f"order must name tp, dp and pp once each, such as tp-dp-pp, not {self.order!r}")

    @classmethod
    def of_world(cls, ranks: int, tp: int = 1, pp: int = 1, order: str = "tp-dp-pp") -> "ParallelDims":
        """What is left of ``ranks`` after tp and pp is data parallel; ValueError when that does not divide."""
        if tp < 1 or pp < 1 or ranks < 1 or ranks % (tp * pp):
            raise ValueError(f"{ranks} ranks do not divide into copies of tp {tp} × pp {pp} = {tp * pp}")
        return cls(tp=tp, dp=ranks // (tp * pp), pp=pp, order=order)

    @property
    def size(self) -> int:
        return self.tp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place on each axis, e.g. ``{"tp": 1, "dp": 0, "pp": 3}``."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not one of the {self.size} ranks 0 to {self.size - 1}")
        place = {}
        for axis in self.order.split("-"):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def rank(self, tp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The number of the rank at that place."""
        place, number, stride = {"tp": tp, "dp": dp, "pp": pp}, 0, 1
        for axis in self.order.split("-"):
            if not 0 <= place[axis] < getattr(self, axis):
                raise ValueError(f"{axis} {place[axis]} is not one of 0 to {getattr(self, axis) - 1}")
            number += place[axis] * stride
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
        rest = [axis for axis in AXES if axis not in named]
        members = [
            sorted(
                self.rank(**dict(zip(rest, outer, strict=True)), **dict(zip(named, inner, strict=True)))
                for inner in product(*(range(getattr(self, axis)) for axis in named))
            )
            for outer in product(*(range(getattr(self, axis)) for axis in rest))
        ]
        return sorted(members)


def held_in_part(module: "nn.Module") -> "Iterator[tuple[str, nn.Parameter, dist.ProcessGroup]]":
    """Parameters of which this rank has a part, or others than its neighbours, with the group that has all of them.

    The layers say so, by a method of this name: what is cut by columns, rows or the vocabulary, and experts. Whoever
    gives ranks one rank's values, averages gradients over ranks, or takes a norm over them, has to ask.
    """
    for name, layer in module.named_modules():
        own = getattr(layer, "held_in_part", None)
        if own is not None:
            yield from ((f"{name}.{of}" if name else of, parameter, group) for of, parameter, group in own())


def cut_within(module: "nn.Module", group: dist.ProcessGroup) -> str:
    """Why a group cannot hold replicas of this module, in a sentence: its ranks have different parts. Empty if not."""
    ours = set(dist.get_process_group_ranks(group))
    for name, _, cut in held_in_part(module):
        ranks = dist.get_process_group_ranks(cut)
        if len(ours & set(ranks)) > 1:
            return (
                f"{name} is cut over ranks {ranks}, and ranks {sorted(ours)} would be given one rank's part of it: "
                "give the data-parallel group, whose ranks have the same part"
            )
    return ""


class Groups:
    """The process groups of a layout, as a context manager: this rank's own are ``groups.tp``, ``.dp``, ``.pp``.

    >>> with Groups(Layout(tp=2, dp=2)) as groups:           # doctest: +SKIP
    ...     model = BucketedDataParallel(split(model, groups.tp), groups.dp)

    Collective: every rank of the job enters and leaves it. The groups end with the block, and layers built on them
    cannot be used after it.

    Raises:
        ValueError: the layout is not of as many ranks as there are.
    """

    def __init__(self, layout: ParallelDims):
        self.layout = layout
        self.tp: dist.ProcessGroup
        self.dp: dist.ProcessGroup
        self.pp: dist.ProcessGroup

    def __enter__(self) -> "Groups":
        if dist.get_world_size() != self.layout.size:
            sizes = " × ".join(f"{axis} {getattr(self.layout, axis)}" for axis in self.layout.order.split("-"))
            raise ValueError(f"{sizes} is {self.layout.size} ranks, but there are {dist.get_world_size()}")
        for axis in AXES:
            for ranks in self.layout.groups(axis):
                group = dist.new_group(ranks)  # every rank calls it for every group, as torch demands
                if dist.get_rank() in ranks:
                    setattr(self, axis, group)
        # gloo's ranks connect one by one: whoever left the block at once would hang up on one that still connects
        dist.barrier()
        return self

    def __exit__(self, *error: object) -> None:
        for axis in AXES:
            dist.destroy_process_group(getattr(self, axis))


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
