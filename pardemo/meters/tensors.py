"""Finds tensors in arguments, the local tensors of sharded ones and their bytes, and the optimizer within a wrapper."""

from collections.abc import Iterable
from typing import Any

import torch

from pardemo import compat


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer that keeps the states: within Accelerate's and DeepSpeed's the one that they wrap."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an operator's arguments or results, in order: those come in lists, tuples and dicts alone."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    tensors = []
    for part in value:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif isinstance(part, (list, tuple, dict)):
            tensors += tensors_in(part)
    return tensors


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the bytes: a DTensor's local part, a sparse tensor's indices and values; none for meta."""
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.nn.Parameter:
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]  # a DTensor's mesh is among them
        return [part for component in inner if isinstance(component, torch.Tensor) for part in local_tensors(component)]
    if tensor.layout is torch.sparse_coo:
        return [*compat.sparse_parts(tensor)]
    # a fake tensor's own attribute: asking for its device is an operation, and would be dispatched
    device = getattr(tensor, "fake_device", None) or tensor.device
    return [] if device.type == "meta" else [tensor]


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Returns the bytes of the tensors' storages on this rank, each counted once; a meta tensor has none."""
    parts = (compat.local_part(tensor) for tensor in tensors if tensor is not None)
    with compat.without_functions():
        storages = (part.untyped_storage() for part in parts if not part.is_meta)  # DeepSpeed keeps parameters' shapes
        # torch.compile keeps shapes of tensors whose sizes are symbols
        sizes = {compat.storage_address(each): each.nbytes() for each in storages if isinstance(each.nbytes(), int)}
    return sum(sizes.values())
