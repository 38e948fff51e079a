"""Makes imports of large libraries faster: without garbage collection, and with torch.compile loaded lazily."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

from pardemo import compat


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Within the block nothing is collected: an import makes little garbage, and the collector walks all of it often.

    A seventh of the time that DeepSpeed, PEFT and Transformers take.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextlib.contextmanager
def compile_at_first_call() -> Iterator[None]:
    """Within the block ``torch.compile`` puts off its work until what it made is called for the first time.

    DeepSpeed and Megatron-core decorate functions of theirs with it, so that importing either loads all of torch's
    code generator: a second and a half, in each process, for kernels that a CPU rank never calls.
    """
    import torch

    real = torch.compile

    def later(model: Callable | None = None, **options: Any) -> Callable:
        if model is None:
            return functools.partial(later, **options)
        if not callable(model) or isinstance(model, torch.nn.Module):
            return real(model, **options)

        compiled: Callable | None = None

        @functools.wraps(model)
        def first_call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if compiled is None:
                compiled = real(model, **options)
            return compiled(*args, **kwargs)

        return first_call

    with compat.replaced(torch, "compile", later):
        yield
