"""What a parameter is while its values are in the ranks' shards: something that says so when it is used."""

import torch
from torch import nn

from pardemo import compat

#: What may be asked of a tensor without its values.
HARMLESS = {
    torch.Tensor.__hash__,
    torch.Tensor.data_ptr,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.nelement,
    torch.Tensor.numel,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.requires_grad_,
    torch.Tensor.size,
    torch.Tensor.storage_offset,
    torch.Tensor.stride,
    torch.Tensor.untyped_storage,
}
_VALUES = torch.Tensor.data.__get__
_SET_GRADIENT = torch.Tensor.grad.__set__


class ShardedParameter(nn.Parameter):
    """A parameter takes this class between two uses, and its own again when it is gathered.

    It is still the same object, with its gradient, its hooks and no elements. Torch does likewise with parameters
    whose shape is not known yet (``UninitializedParameter``).
    """

    #: set by the engine: how the module calls it
    sharded_name: str

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        attribute = getattr(function, "__name__", "")
        asks = attribute == "__get__" and function != _VALUES
        clears = attribute == "__set__" and function != torch.Tensor.data.__set__
        if asks or clears or function in HARMLESS:
            with compat.without_functions():
                if function == _SET_GRADIENT and args[1] is args[0].grad:
                    return None  # p.grad *= 2: it has the shape of the whole, which torch would refuse here
                return function(*args, **(kwargs or {}))
        used = next((leaf for leaf in compat.tree_leaves((args, kwargs)) if isinstance(leaf, cls)), None)
        raise RuntimeError(
            f"{getattr(used, 'sharded_name', 'a parameter')} is in shards here: use it in its own layer's forward, in "
            "a method named to engine.register_forward_method(), or within engine.whole()"
        )
