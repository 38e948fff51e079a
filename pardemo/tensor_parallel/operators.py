"""f, g and their relatives: what happens on the way forward, and its mirror image on the way back.

| operator | forward | backward | name in the papers |
|---|---|---|---|
| :func:`copy_to` | nothing | all-reduce | f (1909.08053 3) |
| :func:`reduce_from` | all-reduce | nothing | g |
| :func:`gather_from` | all-gather | this rank's columns | |
| :func:`gather_sequence` | all-gather | reduce-scatter | g (2205.05198 4.2.2) |
| :func:`reduce_scatter_sequence` | reduce-scatter | all-gather | ḡ |
| :func:`scatter_sequence` | this rank's tokens | all-gather | |

In shapes, on t ranks: copy_to and reduce_from [b, s, h] to [b, s, h]; gather_from [b, s, h/t] to [b, s, h];
gather_sequence [b, s/t, h] to [b, s, h]; reduce_scatter_sequence and scatter_sequence back.

None changes its input or the gradient that it is handed; :func:`copy_to`'s result shares its input's memory, and in a
group of one each returns its input. A second derivative (``create_graph=True``) is refused.

All ranks of the group have to call the same operators, forward and backward: an input that requires a gradient on one
rank alone leaves that rank waiting for the others.
"""

import torch
import torch.distributed as dist

from pardemo.collectives.decorators import first_derivative_only, not_compiled
from pardemo.groups import group_of, share
from pardemo.tensor_parallel import exchange

COLUMNS, SEQUENCE = -1, -2


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        copies = tuple(t.view_as(t) for t in tensors)
        return copies if len(copies) > 1 else copies[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        packed = torch.cat([g.reshape(-1) for g in gradients])  # [numel of all]
        exchange.all_reduce_in_place(packed, ctx.group)
        parts = packed.split([g.numel() for g in gradients])
        return None, *(part.view_as(g) for part, g in zip(parts, gradients, strict=True))


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, tensor):
        return exchange.all_reduce(tensor, group)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        return None, gradient


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, tensor, dim, reduces):
        ctx.group, ctx.dim, ctx.reduces = group, positive(tensor, dim), reduces
        return exchange.all_gather(tensor, group, ctx.dim)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        back = exchange.reduce_scatter if ctx.reduces else exchange.split
        return None, back(gradient, ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, tensor, reduces):
        ctx.group, ctx.dim = group, positive(tensor, SEQUENCE)
        share(tensor.shape[ctx.dim], group, "a sequence")
        return (exchange.reduce_scatter if reduces else exchange.split)(tensor, group, ctx.dim)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        return None, exchange.all_gather(gradient, ctx.group, ctx.dim), None


@not_compiled
def copy_to(*tensors: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """f: what every rank has goes on to every rank's part of a layer; backward, the parts' gradients are summed.

    Also for a parameter that all ranks hold but each uses on its own tokens (norms under sequence parallelism). The
    gradients of several tensors travel in one message.
    """
    group = group_of(group)
    if group.size() == 1:
        return tensors if len(tensors) > 1 else tensors[0]
    return _CopyTo.apply(group, *tensors)


@not_compiled
def reduce_from(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """g: the ranks' partial results are summed; backward, each part gets the whole gradient."""
    group = group_of(group)
    return tensor if group.size() == 1 else _ReduceFrom.apply(group, tensor)


@not_compiled
def gather_from(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The parts of the last dimension together; backward, this rank's part of a gradient that all ranks have."""
    group = group_of(group)
    return tensor if group.size() == 1 else _Gather.apply(group, tensor, COLUMNS, False)


@not_compiled
def gather_sequence(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, whole_gradient: bool = False
) -> torch.Tensor:
    """All tokens from each rank's; backward, the ranks' gradients are summed and each gets its tokens' part.

    With ``whole_gradient`` every rank's gradient is the whole one already, as behind a layer that is not split, and is
    only cut.
    """
    group = group_of(group)
    return tensor if group.size() == 1 else _Gather.apply(group, tensor, SEQUENCE, not whole_gradient)


@not_compiled
def reduce_scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Partial results of all tokens to the summed result of this rank's; backward, all tokens' gradients."""
    group = group_of(group)
    return tensor if group.size() == 1 else _Scatter.apply(group, tensor, True)


@not_compiled
def scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's tokens of what every rank has: the way into a sequence-parallel region."""
    group = group_of(group)
    return tensor if group.size() == 1 else _Scatter.apply(group, tensor, False)


def positive(tensor: torch.Tensor, dim: int) -> int:
    """``dim`` counted from the front; ValueError for a tensor without it."""
    if tensor.dim() < -dim:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim} to cut")
    return tensor.dim() + dim
