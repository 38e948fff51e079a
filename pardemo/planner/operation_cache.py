"""What an operation on fake tensors makes, known from the first time: layers that are alike repeat each of them.

Torch's own FakeTensorMode keeps such a memory too, and takes 0.1 ms to look into it. Here it is a look-up by the same
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
MISSING = object()  # nothing is known: None is what some operations return
#: How a result is made, by what it depends on; None where torch would not keep it. For all dry runs of a process.
_FOUND: dict[tuple, tuple | None] = {}


class Known:
    """Results of operations under ``mode``, by function and arguments."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._found = _FOUND

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple | None:
        """What the result depends on; None where an argument is of another kind than numbers and fake tensors."""
        found = [func, torch.get_default_dtype(), compat.default_device()]
        if not self._describe(found, args):
            return None
        for name, value in kwargs.items():
            found.append(name)
            if not self._describe(found, (value,)):
                return None
        return tuple(found)

    def _describe(self, found: list, values: Sequence[Any]) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or value.constant is not None or value.layout is not torch.strided:
                    return False
                found += (
                    value.dtype, value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes(),
                    value.fake_device, value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference(),
                )  # fmt: skip
            elif kind in _WHOLE and value.device == _META:  # a model's parameters before they are in memory
                found += (kind, value.dtype, value.shape, value.stride(), value.requires_grad)
            elif kind in _PLAIN:
                found += (kind, value)  # 1, 1.0 and True are equal
            elif isinstance(value, (list, tuple)):
                found += (kind, len(value))
                if not self._describe(found, value):
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
            return self._dressed(func(bare, *args[1:]), whole.fake_device)

    def again(self, key: tuple, args: Sequence[Any]) -> Any:
        """The result for a key, made anew, or :data:`MISSING`."""
        how = self._found.get(key)
        return MISSING if how is None else self._made(how, args)

    def learn(self, key: tuple, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Keeps how ``out`` was made, if torch would."""
        if key in self._found:
            return
        self._found[key] = None
        try:
            compat.check_remembered(self._mode, func, args, kwargs)
        except BypassDispatchCache:
            return
        self._found[key] = self._how(func, args, out)

    def _how(self, func: Any, args: Sequence[Any], out: Any) -> tuple | None:
        if out is None:
            return ("nothing",)
        if type(out) in (list, tuple):
            parts = tuple(self._how(func, args, part) for part in out)
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
            how: tuple[Any, ...] = ("view", *shape, tensors[0], out.storage_offset())
        else:
            if out.storage_offset() or any(args[place].untyped_storage() is storage for place in tensors):
                return None
            how = ("new", *shape)
        same = self._made(how, args)
        alike = same.untyped_storage().nbytes() == storage.nbytes()
        return how if alike and compat.dispatch_keys(same) == compat.dispatch_keys(out) else None

    def _made(self, how: tuple, args: Sequence[Any]) -> Any:
        kind = how[0]
        if kind == "same":
            return args[how[1]]
        if kind == "nothing":
            return None
        if kind == "several":
            return how[1](self._made(part, args) for part in how[2])
        _, shape, stride, dtype, device, *view = how
        with compat.without_dispatch():
            bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if view:
                place, offset = view
                bare.set_(args[place].untyped_storage(), offset, shape, stride)
            return self._dressed(bare, device)

    def _dressed(self, bare: Tensor, device: torch.device) -> FakeTensor:
        made = compat.make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device)
        compat.warns_on_data_ptr(made)  # DeepSpeed asks whether addresses are aligned
        made.__dict__.update(_BLANK)
        made.fake_device, made.fake_mode = device, self._mode
        return made


def _blank() -> dict[str, Any]:
    """What torch's constructor writes into a new fake tensor, apart from device and mode."""
    mode = FakeTensorMode()
    made = FakeTensor(mode, torch.empty(1, device="meta"), torch.device("cpu"))
    return {name: value for name, value in made.__dict__.items() if name not in ("fake_device", "fake_mode")}


_BLANK = _blank()
