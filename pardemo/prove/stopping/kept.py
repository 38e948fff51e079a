"""On a rank: what a script keeps beside the model it trains: an average of its weights, a teacher, a memory bank."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from pardemo import compat

#: Elements from which a tensor in a state is worth a word: counters and rates are compared as what they do.
LEAST = 2


def kept(is_own: Callable[[CodeType], bool], models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of modules and of objects with a ``state_dict`` that the script's functions hold, by name.

    Of those that run now: their variables, the script's globals, and the attributes of objects of its own classes.

    Args:
        is_own: whether a function's code is the script's. models: what is trained, which is compared by itself.
    """
    trained = {id(part) for root in models for part in root.modules()}
    trained |= {id(parameter) for root in models for parameter in root.parameters()}
    seen: set[int] = set()
    for name, value in _reached(is_own):
        if id(value) in seen or id(value) in trained or isinstance(value, (torch.optim.Optimizer, type)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            if any(id(parameter) in trained for parameter in value.parameters()):
                continue  # the model in another wrapper, or with a part of it
            state: Any = value.state_dict()
        elif hasattr(value, "load_state_dict") and hasattr(value, "state_dict"):
            state = _asked(value)
        else:
            continue
        for of, tensor in _tensors(name, state):
            if id(tensor) not in trained:
                yield of, tensor


def _reached(is_own: Callable[[CodeType], bool]) -> Iterator[tuple[str, Any]]:
    frame: FrameType | None = sys._getframe(1)
    files: set[str] = set()
    while frame is not None:
        if is_own(frame.f_code):
            yield from _of_scope(frame.f_locals)
            if frame.f_code.co_filename not in files:
                files.add(frame.f_code.co_filename)
                yield from _of_scope(frame.f_globals)
        frame = frame.f_back


def _of_scope(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(names.items()):
        if name.startswith("__"):
            continue
        yield name, value
        if type(value).__module__ == "__main__" and not isinstance(value, (torch.nn.Module, type)):
            yield from ((f"{name}.{of}", inner) for of, inner in list(getattr(value, "__dict__", {}).items()))


def _asked(value: Any) -> Any:
    try:
        return value.state_dict()
    except Exception:
        return {}


def _tensors(name: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        part = compat.local_tensor(state) if hasattr(state, "placements") else state
        if part.numel() >= LEAST:
            yield name, part.detach().cpu().clone().contiguous()
    elif isinstance(state, Mapping):
        for of, inner in state.items():
            yield from _tensors(f"{name}.{of}", inner)
    elif isinstance(state, (list, tuple)):
        for place, inner in enumerate(state):
            yield from _tensors(f"{name}.{place}", inner)
