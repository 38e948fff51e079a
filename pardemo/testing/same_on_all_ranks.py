"""Asserts that a value is the same on all ranks, and says where it is not."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pardemo.world.errors import ranks_by_value, ranks_text

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)


@dataclasses.dataclass(frozen=True)
class _Print:
    """A part of a value as the other ranks get to see it: what it is, and of a tensor the hash of its bytes."""

    path: str
    text: str
    digest: str = ""


def same_on_all_ranks(value: Any, name: str = "value") -> None:
    """Asserts that a value is the same, bit for bit, on all ranks of the default group. Collective.

    Args:
        value: a tensor, a numpy array, a number, a text, None, a module (its state dict), or a list, tuple, dict, set
            or dataclass of such, nested as you like. Tensors travel as hashes; only one that differs is sent.
        name: what the message calls it.

    Raises:
        AssertionError: on all ranks, with the place of the first difference, and which ranks have what there.
        TypeError: a part that has no value to compare, as an object of a class of your own; a sharded tensor.
    """
    __tracebackhide__ = True
    parts = list(_parts(value, name))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [_print_of(path, part) for path, part in parts])
    # a container states its length, so two lists of parts that are the same up to the end of one end together
    number = next((k for k, column in enumerate(zip(*everyone, strict=False)) if len(set(column)) > 1), None)
    if number is None:
        return
    groups: dict[_Print, list[int]] = ranks_by_value({rank: prints[number] for rank, prints in enumerate(everyone)})
    if len({seen.text for seen in groups}) == 1:
        difference = _tensors_apart(_tensor(parts[number][1], name), [*groups.values()])
    else:
        difference = ", ".join(f"{_have(ranks)} {seen.text}" for seen, ranks in groups.items())
    raise AssertionError(f"{parts[number][0]} is not the same on all ranks: {difference}")


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every part of a value with its path, containers as what they are, in an order that all ranks share."""
    if isinstance(value, torch.nn.Module):
        value = dict(value.state_dict())
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, *PLAIN)):
        yield path, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield path, _Container(type(value).__name__)
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, Mapping):
        yield path, _Container(f"a {type(value).__name__} with the keys {', '.join(map(repr, value)) or '(none)'}")
        for key, inner in value.items():
            yield from _parts(inner, f"{path}[{key!r}]")
    elif isinstance(value, (set, frozenset)):
        yield path, _Container(f"a {type(value).__name__} of {', '.join(sorted(map(repr, value))) or 'nothing'}")
    elif isinstance(value, Sequence):
        yield path, _Container(f"a {type(value).__name__} of length {len(value)}")
        for index, inner in enumerate(value):
            yield from _parts(inner, f"{path}[{index}]")
    else:
        raise TypeError(
            f"same_on_all_ranks: {path} is a {type(value).__name__}, which has no bits to compare: give its tensors "
            "and numbers"
        )


class _Container(str):
    """What a container is, in words: the parts follow it."""


def _print_of(path: str, part: Any) -> _Print:
    if isinstance(part, (torch.Tensor, np.ndarray)):
        tensor = _tensor(part, path)
        text = f"a {tensor.dtype} tensor of shape {list(tensor.shape)}".replace("torch.", "")
        return _Print(path, text, hashlib.sha256(_bytes(tensor).numpy().data).hexdigest())
    return _Print(path, str(part) if isinstance(part, _Container) else f"{part!r}")


def _tensor(part: Any, path: str) -> torch.Tensor:
    if isinstance(part, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(part))
    if hasattr(part, "full_tensor"):
        raise TypeError(f"same_on_all_ranks: {path} is a DTensor: give its .full_tensor(), or its .to_local()")
    return part.detach().resolve_conj().resolve_neg().cpu()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _tensors_apart(mine: torch.Tensor, groups: Sequence[list[int]]) -> str:
    """Where tensors of one dtype and shape differ from rank 0's; collective. ``groups``: ranks with the same bytes."""
    sent = [mine]  # on the others what is to be replaced
    dist.broadcast_object_list(sent)
    (first,) = sent
    apart = (_bytes(first) != _bytes(mine)).reshape(mine.numel(), -1).any(1).nonzero().flatten().tolist()
    differences: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(differences, _difference(first, mine, apart) if apart else None)
    zero, *others = groups
    lines = []
    for ranks in others:
        at, theirs, ours, rest = differences[ranks[0]]
        lines.append(f"{at}{_have(zero)} {theirs}, {_have(ranks)} {ours} {rest}")
    return "; ".join(lines)


def _difference(first: torch.Tensor, mine: torch.Tensor, apart: Sequence[int]) -> tuple[str, str, str, str]:
    """Place, both values there, and how much of the tensors differs."""
    index = [int(i) for i in np.unravel_index(apart[0], mine.shape)] if mine.dim() else []
    theirs, ours = (repr(tensor.reshape(-1)[apart[0]].item()) for tensor in (first, mine))
    rest = f"({len(apart)} of {mine.numel()} elements differ"
    if mine.is_floating_point():
        largest = (first.double() - mine.double()).abs().max().item()
        rest += f", by {largest:.3g} at most"
    return f"at {index} " if index else "", theirs, ours, rest + ")"


def _have(ranks: list[int]) -> str:
    return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'}"
