"""``.grad`` of a parameter that is cut: torch's functions that look at all of a gradient see all ranks' parts of it.

``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` walk over ``.grad``. With plain tensors each rank would
take its own parts for the whole: another norm, and another factor, on every rank, or a step that one rank skips::

    rank 0   .grad of its part -- norm² --+
                                          +--> sum over the ranks: the norm² of the full weight's gradient, on both
    rank 1   .grad of its part -- norm² --+
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.groups import Cut, cut_of, mark_cut
from pardemo.tensor_parallel import exchange

_NORM, _NORMS = torch.linalg.vector_norm, compat.foreach_norm
_UNSCALE = compat.unscale_


def mark_part(
    parameter: nn.Parameter | None,
    group: dist.ProcessGroup,
    dim: int | None,
    counted: tuple[tuple[int, int], ...] | None = None,
) -> None:
    """:func:`pardemo.groups.mark_cut`, and gradients of the parameter are :class:`PartGradient` from now on."""
    if parameter is None or cut_of(parameter):
        return
    mark_cut(parameter, group, dim, counted)
    cut = cut_of(parameter)
    if cut is None or not parameter.is_floating_point():
        return

    def show(parameter: nn.Parameter) -> None:
        if type(parameter.grad) is torch.Tensor:  # not what an engine of ZeRO shows there
            parameter.grad = _as_part(cut, parameter.grad)

    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen one may be trained later
    parameter.register_post_accumulate_grad_hook(show)
    parameter.requires_grad_(trained)


class PartGradient(torch.Tensor):
    """This rank's part of a gradient; ``vector_norm`` of it is the full gradient's. Collective: all ranks ask."""

    cut: Cut

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with compat.without_functions():
            if function is _NORM and _is_part(args[0]) and len(args) < 3 and set(kwargs) <= {"ord", "dtype"}:
                return _norm(args[0], *args[1:2], **kwargs)
            if function is _NORMS:
                return [_norm(g, *args[1:2], **kwargs) if _is_part(g) else _NORM(g, *args[1:2]) for g in args[0]]
            result = function(*args, **kwargs)
            if function is _UNSCALE:
                _share_overflow(args[0], args[1])
            return result

    def same_kind(self) -> Callable[[torch.Tensor], "PartGradient"]:
        """Makes another tensor, such as a bucket's view with the mean, the gradient of the same part."""
        return partial(_as_part, self.cut)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # elsewhere it is a tensor like any other

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.detach().clone()


def _as_part(cut: Cut, tensor: torch.Tensor) -> PartGradient:
    gradient = tensor.as_subclass(PartGradient)
    gradient.cut = cut
    return gradient


def _is_part(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, PartGradient) and hasattr(gradient, "cut")  # a copy or a view of one has no cut


def _norm(gradient: PartGradient, ord: float = 2.0, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of the full gradient, the same bits on every rank; elements that several ranks have count once."""
    order, group = float(ord), gradient.cut.group
    if not order > 0:
        raise ValueError(f"gradients of which each rank has a part have norms of orders above 0, not {order}")
    flat, kept = gradient.reshape(-1), dtype or torch.promote_types(gradient.dtype, torch.float32)
    norms = [_NORM(flat[a:b], order, dtype=kept).double() for a, b in gradient.cut.counted]
    local = torch.stack(norms) if norms else flat.new_zeros(1, dtype=torch.float64)
    label = f"a norm of order {order:g} of a gradient"
    if math.isinf(order):
        total = exchange.all_reduce_in_place(local.amax(0, keepdim=True), group, "max", label=label)
    else:
        total = exchange.all_reduce_in_place(local.pow(order).sum(0, keepdim=True), group, label=label).pow(1 / order)
    return total[0].to(dtype or gradient.dtype)


def _share_overflow(gradients: Any, found_inf: torch.Tensor) -> None:
    """What is not finite in one rank's part is not finite in the full gradient."""
    for group in {g.cut.group: None for g in gradients if _is_part(g)}:
        found_inf.copy_(exchange.all_reduce(found_inf.reshape(1), group, "max").reshape(found_inf.shape))
