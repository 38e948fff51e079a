"""A script in fp64: what it makes, asks for or converts to in a shorter floating-point type, it gets in this one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pardemo import compat

_SHORT = {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
#: Methods that name a type.
_NAMED = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
#: Functions whose result has the type of what they read, and not of what they are asked for.
_READS = {torch.from_numpy, torch.frombuffer, torch.load, torch.tensor, torch.as_tensor}


class _Double(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is compat.scaled_mm:
            return _scaled(*args, **kwargs)
        if func in _NAMED:
            return torch.Tensor.double(*args)
        if any(arg in _SHORT for arg in args if isinstance(arg, torch.dtype)):
            args = tuple(torch.float64 if isinstance(arg, torch.dtype) and arg in _SHORT else arg for arg in args)
        if kwargs.get("dtype") in _SHORT and isinstance(kwargs["dtype"], torch.dtype):
            kwargs = {**kwargs, "dtype": torch.float64}
        made = func(*args, **kwargs)
        if func in _READS and isinstance(made, torch.Tensor) and made.dtype in _SHORT:
            return made.double()
        return made


def _scaled(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Any = None, *_: Any, **__: Any
) -> torch.Tensor:
    """The product of two matrices that were scaled for fp8, each with one scale, or one for each row or column."""
    product = (a * scale_a) @ (b * scale_b)
    return product if bias is None else product + bias


@contextlib.contextmanager
def double(notes: list[str]) -> Iterator[None]:
    """Within the block floating point is fp64: torch's default, what a script names, and autocast is off."""
    before = torch.get_default_dtype()
    enter, set_default = torch.amp.autocast_mode.autocast.__init__, torch.set_default_dtype

    def autocast(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["enabled"] = False
        enter(self, *args, **kwargs)

    mode = _Double()

    def backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """torch takes the mode away while a backward pass runs; a forward pass that it runs again needs it."""
        with mode:
            return run(*args, **kwargs)

    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    policies: list[Any] = [MixedPrecisionPolicy, MixedPrecision]  # of FSDP2, and of FSDP1

    def in_one_type(make: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            short = [None if arg in _SHORT else arg for arg in args]
            make(self, *short, **{name: None if value in _SHORT else value for name, value in kwargs.items()})

        return init

    notes.append("--double: fp32, bf16 and fp16 → fp64, autocast → off")
    set_default(torch.float64)
    with (
        compat.replaced(torch, "set_default_dtype", lambda dtype: set_default(torch.float64)),
        compat.replaced(torch.amp.autocast_mode.autocast, "__init__", autocast),
        compat.replaced(*compat.engine_replaced(backward)),
        contextlib.ExitStack() as stack,
        mode,
    ):
        for policy in policies:
            stack.enter_context(compat.replaced(policy, "__init__", in_one_type(policy.__init__)))
        try:
            yield
        finally:
            set_default(before)
