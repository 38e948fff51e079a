"""Makes ``.grad`` refuse to be computed with where it is not the model's gradient before ``step()``.

torch's ``clip_grad_norm_`` would take a rank's own norm, and clip by a factor of its own on every rank.
"""

import functools

import torch

from pardemo import compat

#: What may be asked without the values.
_HARMLESS = {
    *(getattr(torch.Tensor, name).__get__ for name in (
        "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_sparse", "itemsize", "layout",
        "nbytes", "ndim", "requires_grad", "shape",
    )),
    *(getattr(torch.Tensor, name) for name in (
        "__hash__", "data_ptr", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "nelement",
        "numel", "size", "storage_offset", "stride", "untyped_storage",
    )),
}  # fmt: skip


class OwnGradient(torch.Tensor):
    """Stages 1 and 2: not the ranks' mean. Autograd adds to it as to any other tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function not in _HARMLESS:
            raise RuntimeError(
                f"{getattr(function, '__name__', function)}() of .grad, which before step() is not the gradient of the "
                "whole model: clip by the engine's max_norm, discard by engine.zero_grad()"
            )
        with compat.without_functions():
            return function(*args, **(kwargs or {}))


def no_gradient(parameter: torch.Tensor) -> OwnGradient:
    """Returns a placeholder, without memory, for a parameter's gradient that is elsewhere."""
    return parameter.detach().new_zeros(1).expand(parameter.shape).as_subclass(OwnGradient)


@functools.cache
def own_shard_gradient() -> type:
    """Stage 3: the class of a DTensor that is the mean of a part of the model, where layers are cut, or of a stage."""
    from torch.distributed.tensor import DTensor

    refusing = {"__slots__": (), "__torch_function__": vars(OwnGradient)["__torch_function__"]}
    return type("OwnShardGradient", (DTensor,), refusing)
