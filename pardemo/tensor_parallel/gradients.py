"""``.grad`` of a weight that is cut: torch's functions that look at all of a gradient see all ranks' parts of it.

``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` walk over ``.grad``. With plain tensors each rank would
take its own parts for the whole: another norm, and another factor, on every rank, or a step that one rank skips::

    rank 0   .grad of its part -- norm² --+
                                          +--> sum over the ranks: the norm² of the full weight's gradient, on both
    rank 1   .grad of its part -- norm² --+
"""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.tensor_parallel import exchange

if TYPE_CHECKING:
    from pardemo.tensor_parallel.module import GroupModule

_NORM, _NORMS = torch.linalg.vector_norm, compat.foreach_norm
_UNSCALE = compat.unscale_


class PartGradient(torch.Tensor):
    """This rank's part of a gradient; ``vector_norm`` of it is the full gradient's. Collective: all ranks ask."""

    #: set by :func:`show_parts`: the parameter's layer, and the parameter
    layer: "weakref.ref[GroupModule]"
    parameter: "weakref.ref[nn.Parameter]"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with compat.without_functions():
            if function is _NORM and _is_whole(args, kwargs):
                return _norm(args[0], *args[1:2], **kwargs)
            if function is _NORMS:
                return [_norm(g, *args[1:2], **kwargs) if _is_part(g) else _NORM(g, *args[1:2]) for g in args[0]]
            result = function(*args, **kwargs)
            if function is _UNSCALE:
                _share_overflow(args[0], args[1])
            return result

    def same_kind(self) -> Callable[[torch.Tensor], "PartGradient"]:
        """Makes another tensor, such as a bucket's view with the mean, the gradient of the same part."""
        return partial(_as_part, self.layer, self.parameter)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # elsewhere it is a tensor like any other

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.detach().clone()


def show_parts(layer: "GroupModule") -> None:
    """Gradients of ``layer``'s cut parameters become :class:`PartGradient` as soon as a backward pass has made them."""
    if layer.group.size() == 1:
        return
    of = weakref.ref(layer)

    def show(parameter: nn.Parameter) -> None:
        if type(parameter.grad) is torch.Tensor:  # not what an engine of ZeRO shows there
            parameter.grad = _as_part(of, weakref.ref(parameter), parameter.grad)

    for name in layer.cut:
        parameter = getattr(layer, name)
        if parameter is not None and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(show)


def _as_part(
    layer: "weakref.ref[GroupModule]", parameter: "weakref.ref[nn.Parameter]", tensor: torch.Tensor
) -> PartGradient:
    gradient = tensor.as_subclass(PartGradient)
    gradient.layer, gradient.parameter = layer, parameter
    return gradient


def _is_part(gradient: torch.Tensor) -> bool:
    """Not a copy or a view of one, which has no layer."""
    return isinstance(gradient, PartGradient) and hasattr(gradient, "layer") and gradient.layer() is not None


def _is_whole(args: tuple, kwargs: dict) -> bool:
    return _is_part(args[0]) and len(args) < 3 and set(kwargs) <= {"ord", "dtype"}


def _norm(gradient: PartGradient, ord: float = 2.0, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of the full gradient, the same bits on every rank; elements that several ranks have count once."""
    layer, parameter, order = gradient.layer(), gradient.parameter(), float(ord)
    assert layer is not None  # see _is_part
    assert parameter is not None
    if not order > 0:
        raise ValueError(f"gradients of which each rank has a part have norms of orders above 0, not {order}")
    flat = gradient.reshape(-1)
    kept = dtype or torch.promote_types(gradient.dtype, torch.float32)
    own = [_NORM(flat[a:b], order, dtype=kept).double() for a, b in layer.counted_here(parameter) if b > a]
    norms = torch.stack(own) if own else flat.new_zeros(1, dtype=torch.float64)
    what = f"a norm of order {order:g} of a gradient"
    if math.isinf(order):
        total = exchange.all_reduce_in_place(norms.amax(0, keepdim=True), layer.group, "max", what=what)
    else:
        powers = norms.pow(order).sum(0, keepdim=True)
        total = exchange.all_reduce_in_place(powers, layer.group, what=what).pow(1 / order)
    return total[0].to(dtype or gradient.dtype)


def _share_overflow(gradients: Any, found_inf: torch.Tensor) -> None:
    """What is not finite in one rank's part is not finite in the full gradient."""
    groups: dict[dist.ProcessGroup, None] = {g.layer().group: None for g in gradients if _is_part(g)}
    for group in groups:
        largest = exchange.all_reduce(found_inf.reshape(1), group, "max", what="whether gradients are finite")
        found_inf.copy_(largest.reshape(found_inf.shape))
