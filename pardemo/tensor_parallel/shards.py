"""Which part of a full layer a rank holds, and what it means that several ranks hold the same part."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives.decorators import first_derivative_only
from pardemo.tensor_parallel import exchange


@dataclass(frozen=True)
class Section:
    """One section of a fused layer, cut into ``parts``; with fewer parts than ranks, neighbours hold the same one."""

    total: int
    parts: int
    part: int  # this rank's

    @classmethod
    def of(cls, total: int, copies: int, group: dist.ProcessGroup) -> "Section":
        """``total`` outputs of which ``copies`` ranks each hold a part; ValueError where it does not divide."""
        ranks = group.size()
        if copies < 1 or ranks % copies:
            raise ValueError(f"{copies} copies of a part do not divide the {ranks} ranks of the group")
        parts = ranks // copies
        if total % parts:
            holders = f"{ranks} ranks" if copies == 1 else f"{parts} parts"
            raise ValueError(f"an output width of {total} does not divide by the {holders} of the group")
        return cls(total, parts, dist.get_rank(group) // copies)

    @property
    def here(self) -> int:
        """Outputs on this rank."""
        return self.total // self.parts


def part_of(full: Sequence[torch.Tensor], sections: Sequence[Section], dim: int) -> nn.Parameter:
    """This rank's slice of every section, one after the other, as a parameter of its own."""
    whole = full[0].detach() if len(full) == 1 else torch.cat([tensor.detach() for tensor in full], dim)
    pieces = whole.split([section.total for section in sections], dim)
    slices = [p.narrow(dim, s.part * s.here, s.here) for p, s in zip(pieces, sections, strict=True)]
    own = slices[0].clone(memory_format=torch.contiguous_format) if len(slices) == 1 else torch.cat(slices, dim)
    return nn.Parameter(own, requires_grad=full[0].requires_grad)


def copied(
    tensors: Sequence[torch.Tensor | None], sections: Sequence[Section], group: dist.ProcessGroup
) -> tuple[torch.Tensor | None, ...]:
    """The weight and the bias as they are; backward, rows that several ranks hold get the sum of their gradients.

    The ranks' gradients of such a section are put beside each other and summed over the whole group, in one message for
    all: 2(N−1)/N of the full section's gradient. Every holder ends with the same bits. Two key heads on four ranks::

        rank 0   [ a | 0 ]                         rank 0   a + b
        rank 1   [ b | 0 ]     all-reduce          rank 1   a + b
        rank 2   [ 0 | c ]    ------------>        rank 2   c + d
        rank 3   [ 0 | d ]   [ a+b | c+d ]         rank 3   c + d
    """
    trained = [t for t in tensors if t is not None and t.requires_grad]
    if not trained or all(section.parts == group.size() for section in sections):
        return tuple(tensors)
    shared = _SumCopies.apply(group, tuple(sections), *trained)
    with_gradient = iter(shared if isinstance(shared, tuple) else (shared,))
    return tuple(next(with_gradient) if t is not None and t.requires_grad else t for t in tensors)


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, sections, *tensors):
        ctx.group, ctx.sections = group, sections
        views = tuple(t.view_as(t) for t in tensors)
        return views if len(views) > 1 else views[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        results = [g.clone() for g in gradients]
        rows = [  # of each result, those that other ranks hold too
            (section, part)
            for result in results
            for section, part in zip(ctx.sections, result.split([s.here for s in ctx.sections]), strict=True)
            if section.parts < ctx.group.size()
        ]
        tables = [part.new_zeros(section.parts, part.numel()) for section, part in rows]  # [parts, numel] each
        for (section, part), table in zip(rows, tables, strict=True):
            table[section.part] = part.reshape(-1)
        summed = exchange.all_reduce_in_place(torch.cat([t.view(-1) for t in tables]), ctx.group)
        for (section, part), table in zip(rows, summed.split([t.numel() for t in tables]), strict=True):
            part.copy_(table.view(section.parts, -1)[section.part].view_as(part))
        return None, None, *results
