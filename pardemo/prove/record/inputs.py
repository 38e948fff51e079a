"""On a rank: what a model is called with, as tensors whose first axis is that of the samples."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

#: Arguments that are the samples, of whatever else a model is given.
_FIRST = ("input_ids", "inputs_embeds", "pixel_values", "tokens")
#: What says nothing of the samples.
_PLAIN = (torch.Tensor, np.ndarray, str, bool, int, float, type(None))


def tensors(inputs: Any, given: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """A model's inputs with a first axis, by name, the samples' first; within lists, dicts and dataclasses, too.

    Where there is none, lists of texts or numbers stand for it: a text as a hash of it.
    """
    named = [*((f"input {number}", value) for number, value in enumerate(inputs)), *given.items()]
    leaves = [leaf for name, value in named for leaf in _walked(name, value)]
    found = [(name, tensor) for name, value in leaves if (tensor := _tensor(value)) is not None]
    found = found or [(name, tensor) for name, value in leaves if (tensor := _listed(value)) is not None]
    return sorted(found, key=lambda item: _FIRST.index(item[0]) if item[0] in _FIRST else len(_FIRST))


def unseen(inputs: Any, given: Mapping[str, Any]) -> list[str]:
    """Kinds of objects among a model's inputs that nothing is known of."""
    leaves = [leaf for value in (*inputs, *given.values()) for _, leaf in _walked("", value)]
    return sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN)})


def _walked(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walked(str(key), inner)
    elif isinstance(value, (list, tuple)) and _listed(value) is None:
        for number, inner in enumerate(value):
            yield from _walked(f"{name}.{number}", inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _walked(part.name, getattr(value, part.name))
    else:
        yield name, value


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor) or value.dim() < 1:
        return None
    return value.to_local() if hasattr(value, "to_local") else value


def _listed(value: Any) -> torch.Tensor | None:
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if all(isinstance(one, str) for one in value):
        digests = [hashlib.blake2b(one.encode(errors="replace"), digest_size=8).digest() for one in value]
        return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
    if all(isinstance(one, (int, float)) for one in value):
        return torch.tensor(value)
    return None
