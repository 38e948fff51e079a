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

from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.collectives.decorators import first_derivative_only, not_compiled
from pardemo.groups import divide, group_of
from pardemo.tensor_parallel import exchange

COLUMNS, SEQUENCE = -1, -2
#: (tensor, group, dimension) -> what this rank has of it
Move = Callable[[torch.Tensor, dist.ProcessGroup, int], torch.Tensor]


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


class _Operator(torch.autograd.Function):
    """``forth`` on the way forward, ``back`` on the way back."""

    @staticmethod
    def forward(ctx, tensor, group, dim, forth, back):
        ctx.how = group, dim, back
        return forth(tensor, group, dim)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        group, dim, back = ctx.how
        return back(gradient, group, dim), None, None, None, None


@not_compiled
def _apply(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, dim: int, forth: Move, back: Move, cuts: str = ""
) -> torch.Tensor:
    """``cuts``: what ``forth`` cuts along ``dim``, for the error where it does not divide."""
    group = group_of(group)
    if group.size() == 1:
        return tensor
    axis = positive(tensor, dim)
    if cuts:
        divide(tensor.shape[axis], group, cuts)
    return _Operator.apply(tensor, group, axis, forth, back)


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup, _: int) -> torch.Tensor:
    return exchange.all_reduce(tensor, group)


def _as_it_is(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor


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


def reduce_from(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """g: the ranks' partial results are summed; backward, each part gets the whole gradient."""
    return _apply(tensor, group, 0, _sum, _as_it_is)


def gather_from(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The parts of the last dimension together; backward, this rank's part of a gradient that all ranks have."""
    return _apply(tensor, group, COLUMNS, exchange.all_gather, exchange.split)


def gather_sequence(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, whole_gradient: bool = False
) -> torch.Tensor:
    """All tokens from each rank's; backward, the ranks' gradients are summed and each gets its tokens' part.

    With ``whole_gradient`` every rank's gradient is the whole one already, as behind a layer that is not split, and is
    only cut.
    """
    back = exchange.split if whole_gradient else exchange.reduce_scatter
    return _apply(tensor, group, SEQUENCE, exchange.all_gather, back)


def reduce_scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Partial results of all tokens to the summed result of this rank's; backward, all tokens' gradients."""
    return _apply(tensor, group, SEQUENCE, exchange.reduce_scatter, exchange.all_gather, "a sequence")


def scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's tokens of what every rank has: the way into a sequence-parallel region."""
    return _apply(tensor, group, SEQUENCE, exchange.split, exchange.all_gather, "a sequence")


def positive(tensor: torch.Tensor, dim: int) -> int:
    """``dim`` counted from the front; ValueError for a tensor without it."""
    if tensor.dim() < -dim:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim} to cut")
    return tensor.dim() + dim
