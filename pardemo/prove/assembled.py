"""A parameter put together from the ranks' pieces, in the reference's shape."""

from dataclasses import dataclass, field

import torch

from pardemo.prove.whole import Part


@dataclass
class Assembled:
    """A parameter's tensor as the layout has it, in the reference's shape.

    ``value``: of each element what a rank has, the first of them; ``covered``: whether any has. ``apart``: the versions
    of ranks that hold the same part, by part, where they are not equal to the last bit.
    """

    value: torch.Tensor
    covered: torch.Tensor
    apart: list[tuple[Part, dict[int, torch.Tensor]]] = field(default_factory=list)


def assembled(
    shape: tuple[int, ...], holders: list[tuple[int, Part, torch.Tensor]], dtype: torch.dtype = torch.float64
) -> Assembled:
    """Puts pieces of all ranks together.

    Args:
        shape: of the reference's. holders: rank, its part, its values.
    """
    value = torch.zeros(shape, dtype=dtype)
    covered = torch.zeros(shape, dtype=torch.bool)
    by_part: dict[tuple, list[tuple[int, Part, torch.Tensor]]] = {}
    for rank, part, tensor in holders:
        by_part.setdefault(part.key(), []).append((rank, part, tensor))
    made = Assembled(value, covered)
    for same in by_part.values():
        _, part, first = same[0]
        _put(value, part, first.to(dtype))
        _put(covered, part, torch.ones(first.shape, dtype=torch.bool))
        if any(not torch.equal(first, tensor) for _, _, tensor in same[1:]):
            made.apart.append((part, {rank: tensor for rank, _, tensor in same}))
    return made


def _put(whole: torch.Tensor, part: Part, tensor: torch.Tensor) -> None:
    if part.flat is not None:
        whole.reshape(-1)[part.flat : part.flat + tensor.numel()] = tensor.reshape(-1)
        return
    index = []
    for axis, places in enumerate(part.index):
        every = torch.arange(whole.shape[axis]) if places is None else places
        index.append(every.reshape([-1 if one == axis else 1 for one in range(whole.dim())]))
    if index:
        whole[tuple(index)] = tensor
    else:
        whole.copy_(tensor)
