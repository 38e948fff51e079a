"""A cache of what operations on fake tensors make: layers that are alike repeat each of them.

Torch's own FakeTensorMode has such a cache too, and takes 0.1 ms to look into it. Here it is a look-up by the same
properties and a bare tensor of the same shape, for the operations that torch says may be kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pardemo import compat
from pardemo.compat import BypassDispatchCache, FakeTensor, FakeTensorMode

_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_WHOLE = {Tensor, torch.nn.Parameter}
_META = torch.device("meta")
_ATEN = torch.ops.aten
#: Operations that only look at their first argument in another way. They are not looked up but done, on a tensor
#: without values: engines cut flat buffers into thousands, each at another place.
VIEWS = {
    _ATEN.view.default, compat.unsafe_view.default, _ATEN.slice.Tensor, _ATEN.detach.default, _ATEN.t.default,
    _ATEN.transpose.int, _ATEN.expand.default, _ATEN.unsqueeze.default, _ATEN.select.int,
}  # fmt: skip
MISSING = object()  # there is no result: None is what some operations return
#: How a result is made, by what it depends on; None where torch would not keep it. For all dry runs of a process.
_RECIPES: dict[tuple, tuple | None] = {}


class OperationCache:
    """Results of operations under ``mode``, by function and arguments: how each is made, not the tensors."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._recipes = _RECIPES

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple | None:
        """What the result depends on; None where an argument is of another kind than numbers and fake tensors."""
        properties = [func, torch.get_default_dtype(), compat.default_device()]
        if not self._describe(properties, args):
            return None
        for name, value in kwargs.items():
            properties.append(name)
            if not self._describe(properties, (value,)):
                return None
        return tuple(properties)

    def _describe(self, properties: list, values: Sequence[Any]) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or value.constant is not None or value.layout is not torch.strided:
                    return False
                properties += (
                    value.dtype, value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes(),
                    value.fake_device, value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference(),
                )  # fmt: skip
            elif kind in _WHOLE and value.device == _META:  # a model's parameters before they are in memory
                properties += (kind, value.dtype, value.shape, value.stride(), value.requires_grad)
            elif kind in _PLAIN:
                properties += (kind, value)  # 1, 1.0 and True are equal
            elif isinstance(value, (list, tuple)):
                properties += (kind, len(value))
                if not self._describe(properties, value):
                    return False
            else:
                return False
        return True

    def view(self, func: Any, args: Sequence[Any]) -> Any:
        """What one of :data:`VIEWS` makes of a fake tensor; :data:`MISSING` of anything else."""
        whole = args[0]
        if type(whole) is not FakeTensor or whole.fake_mode is not self._mode or whole.constant is not None:
            return MISSING
        with compat.without_dispatch():
            bare = torch.empty(0, dtype=whole.dtype, device=_META)
            bare.set_(whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride())
            return self._as_fake(func(bare, *args[1:]), whole.fake_device)

    def again(self, key: tuple, args: Sequence[Any]) -> Any:
        """The result for a key, made anew, or :data:`MISSING`."""
        recipe = self._recipes.get(key)
        return MISSING if recipe is None else self._make(recipe, args)

    def learn(self, key: tuple, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Keeps how ``out`` was made, if torch would."""
        if key in self._recipes:
            return
        self._recipes[key] = None
        try:
            compat.check_remembered(self._mode, func, args, kwargs)
        except BypassDispatchCache:
            return
        self._recipes[key] = self._recipe(func, args, out)

    def _recipe(self, func: Any, args: Sequence[Any], out: Any) -> tuple | None:
        if out is None:
            return ("nothing",)
        if type(out) in (list, tuple):
            parts = tuple(self._recipe(func, args, part) for part in out)
            return None if any(part is None or part[0] == "same" for part in parts) else ("several", type(out), parts)
        if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
            return None
        for place, arg in enumerate(args):
            if arg is out:
                return ("same", place)
        storage = out.untyped_storage()
        shape = (tuple(out.shape), out.stride(), out.dtype, out.fake_device)
        tensors = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        if func.is_view:
            if len(tensors) != 1 or args[tensors[0]].untyped_storage() is not storage:
                return None
            recipe: tuple[Any, ...] = ("view", *shape, tensors[0], out.storage_offset())
        else:
            if out.storage_offset() or any(args[place].untyped_storage() is storage for place in tensors):
                return None
            recipe = ("new", *shape)
        same = self._make(recipe, args)
        alike = same.untyped_storage().nbytes() == storage.nbytes()
        return recipe if alike and compat.dispatch_keys(same) == compat.dispatch_keys(out) else None

    def _make(self, recipe: tuple, args: Sequence[Any]) -> Any:
        kind = recipe[0]
        if kind == "same":
            return args[recipe[1]]
        if kind == "nothing":
            return None
        if kind == "several":
            return recipe[1](self._make(part, args) for part in recipe[2])
        _, shape, stride, dtype, device, *view = recipe
        with compat.without_dispatch():
            bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if view:
                place, offset = view
                bare.set_(args[place].untyped_storage(), offset, shape, stride)
            return self._as_fake(bare, device)

    def _as_fake(self, bare: Tensor, device: torch.device) -> FakeTensor:
        tensor = compat.make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device)
        compat.warns_on_data_ptr(tensor)  # DeepSpeed asks whether addresses are aligned
        tensor.__dict__.update(_BLANK)
        tensor.fake_device, tensor.fake_mode = device, self._mode
        return tensor


def _blank() -> dict[str, Any]:
    """What torch's constructor writes into a new fake tensor, apart from device and mode."""
    mode = FakeTensorMode()
    tensor = FakeTensor(mode, torch.empty(1, device="meta"), torch.device("cpu"))
    return {name: value for name, value in tensor.__dict__.items() if name not in ("fake_device", "fake_mode")}


_BLANK = _blank()
