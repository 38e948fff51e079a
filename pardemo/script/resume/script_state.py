"""Reads a script's state: of its optimizers, of all else that it keeps with the model, of random generators."""

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from pardemo.compat import local_part
from pardemo.script.runtime.libraries import is_script

#: Kinds of states that no optimizer has: of what else the script keeps, and its copies of the parameters.
KEPT, COPIES = "kept", "copies"
#: Optimizers' names for what they keep, in words.
SLOTS = {
    "exp_avg": "the optimizer's first moment", "exp_avg_sq": "the optimizer's second moment",
    "momentum_buffer": "the optimizer's momentum", "max_exp_avg_sq": "the optimizer's largest second moment",
    "step": "the optimizer's count of steps", "square_avg": "the optimizer's mean of squares",
    "sum": "the optimizer's sum of squares", KEPT: "what the script keeps beside the model",
    COPIES: "the script's copy of the parameters",
}  # fmt: skip


def optimizer_states(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields each parameter that is stepped by name, with each of its states: its name, and this rank's part.

    ``names``: of the models' parameters, by their ids. Others are called by where they are in their optimizer.
    """
    for number, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"optimizer {number}.{group_index}.{index}")
                for slot, value in optimizer.state.get(parameter, {}).items():
                    if (tensor := _plain_tensor(value)) is not None:
                        yield name, str(slot), tensor


def _plain_tensor(value: Any) -> torch.Tensor | None:
    """Copies this rank's part of a state; None where it is no number."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, torch.Tensor):
        return None
    return _copy_of_part(value)


def _copy_of_part(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor).detach().cpu().clone().contiguous()


#: Elements from which a tensor in a state is worth a word: counters and rates are compared as what they do.
LEAST = 2
#: Elements of a list or dict that are looked at: one with more holds samples.
MOST = 100


def untracked_state(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors of modules and of objects with a ``state_dict`` in the script's functions, by kind and name.

    Of those that run now: their variables and the script's globals, and in these elements of lists and dicts and
    attributes of objects of its own classes. Plain tensors where they are as many, and of the same shapes, as the
    parameters, as an average is that somebody has written by hand.

    Args:
        models: what is trained, which is compared by itself.
    """
    models = list(models)
    parameters = [parameter for root in models for parameter in root.parameters()]
    buffers = [buffer for root in models for buffer in root.buffers()]
    shapes = [_shapes_of([p for p in parameters if p.requires_grad]), _shapes_of([*parameters, *buffers])]
    trained = {id(part) for root in models for part in root.modules()}
    trained |= {id(tensor) for parameter in parameters for tensor in (parameter, parameter.grad)}
    addresses = {_address(parameter) for parameter in parameters} - {0}
    seen: set[int] = set()
    for name, value in _reachable():
        if id(value) in seen or id(value) in trained or isinstance(value, (torch.optim.Optimizer, type)):
            continue
        seen.add(id(value))
        kind = KEPT
        state: Any = {}
        if isinstance(value, torch.nn.Module):
            if any(id(parameter) in trained for parameter in value.parameters()):
                continue  # the model in another wrapper, or with a part of it
            state = value.state_dict()
        elif hasattr(value, "load_state_dict") and hasattr(value, "state_dict"):
            state = _state_of(value)
        elif isinstance(value, (dict, list)) and len(value) > 1:
            values = list(value.values()) if isinstance(value, dict) else value
            kind, sizes = COPIES, _shapes_of(values)
            if sizes and sizes in shapes and not any(id(v) in trained or _address(v) in addresses for v in values):
                state = value
        for slot, tensor in _state_tensors(name, state):
            yield f"{kind}/{slot}", tensor


def _shapes_of(values: list[Any]) -> list[tuple[int, ...]]:
    return sorted(tuple(v.shape) for v in values) if all(isinstance(v, torch.Tensor) for v in values) else []


def _address(tensor: torch.Tensor) -> int:
    return local_part(tensor).data_ptr()


def _reachable() -> Iterator[tuple[str, Any]]:
    frame: FrameType | None = sys._getframe(1)
    files: set[str] = set()
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            scopes = [frame.f_locals, *([frame.f_globals] if frame.f_code.co_filename not in files else [])]
            files.add(frame.f_code.co_filename)
            for name, value in (item for scope in scopes for item in list(scope.items())):
                if not name.startswith("__"):
                    yield from _held(name, value)
        frame = frame.f_back


def _held(name: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yields a value, and what is in it: elements of lists and dicts, attributes of objects of the script's classes."""
    yield name, value
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value[:MOST])
    elif type(value).__module__ == "__main__" and not isinstance(value, (torch.nn.Module, type)):
        items = getattr(value, "__dict__", {}).items()
    for key, inner in list(items)[:MOST] if depth else ():
        if not isinstance(inner, (torch.Tensor, str, int, float)):
            yield from _held(f"{name}.{key}", inner, depth - 1)


def _state_of(value: Any) -> Any:
    try:
        return value.state_dict()
    except Exception:
        return {}


def _state_tensors(name: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        if local_part(state).numel() >= LEAST:
            yield name, _copy_of_part(state)
    elif isinstance(state, (Mapping, list, tuple)):
        for key, inner in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _state_tensors(f"{name}.{key}", inner)


def generator_states() -> dict[str, str]:
    """Returns a hash of each generator's state, by name; numpy's only if something has imported it."""
    states: dict[str, bytes] = {
        "torch's": torch.get_rng_state().numpy().tobytes(),
        "Python's": repr(random.getstate()).encode(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state()
        states["numpy's"] = keys.tobytes() + repr(rest).encode()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}
