"""On a rank: which part of which parameter it holds, and that part's values and gradients, without a collective."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pardemo import compat
from pardemo.measure.places import without_wrappers
from pardemo.prove.record import engines
from pardemo.prove.record.facts import Piece


class Held(NamedTuple):
    """A piece, with what it is on this rank: values, and its gradient or None. Both as plain tensors."""

    piece: Piece
    value: torch.Tensor
    gradient: torch.Tensor | None


def outermost(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Modules with parameters that are part of no other one, in the order in which they were met."""
    kept = [root for root in roots if next(root.parameters(), None) is not None]
    within = {id(part) for root in kept for part in root.modules() if part is not root}
    return [root for root in kept if id(root) not in within]


def held(
    roots: Iterable[torch.nn.Module], gradients: bool = True, beside: Iterable[tuple[str, torch.nn.Parameter]] = ()
) -> list[Held]:
    """All parameters of this rank's models: DTensor's, FSDP's, DeepSpeed's, Megatron's, or plain ones.

    DeepSpeed's and those of ZeRO of ours are gathered, for which all ranks have to come here. ``gradients``: False
    after a step, when DeepSpeed has none any more. ``beside``: parameters that no model has, with their names.
    """
    found = _named(roots, lambda root: _of_root(root, gradients))
    return [*found, *(_plain(parameter, (name,)) for name, parameter in beside)]


def at_hand(roots: Iterable[torch.nn.Module], beside: Iterable[tuple[str, torch.nn.Parameter]] = ()) -> list[Held]:
    """What is there in the middle of a step, as far as it needs no collective: nothing of engines that keep shards."""
    return [*_named(roots, _at_hand), *(_plain(parameter, (name,)) for name, parameter in beside)]


def _named(roots: Iterable[torch.nn.Module], of_root: Callable[[torch.nn.Module], Iterable[Held]]) -> list[Held]:
    """The parameters of several models, each with a name of its own."""
    found: dict[str, Held] = {}
    of_class: Counter[str] = Counter()
    for root in roots:
        kind = type(root).__name__
        of_class[kind] += 1
        prefix = f"{kind}." if of_class[kind] == 1 else f"{kind}.{of_class[kind]}."
        for one in of_root(root):
            name = one.piece.name if one.piece.name not in found else prefix + one.piece.name
            found[name] = one._replace(piece=replace(one.piece, name=name))
    return list(found.values())


def _at_hand(root: torch.nn.Module) -> Iterator[Held]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if engines.is_ours(root) or is_deepspeed(root):
        return
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in root.modules()):
        return  # gradients are whole, or none, until the last micro-batch
    for parameter, names in names_of(root).values():
        gradient: Any = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
        if _is_dtensor(gradient):
            same = _is_dtensor(parameter) and gradient.placements == parameter.placements  # type: ignore[attr-defined]
            gradient = compat.local_tensor(gradient) if same else None
        if gradient is not None and gradient.is_sparse:
            gradient = None
        value = (compat.local_tensor(parameter) if _is_dtensor(parameter) else parameter).detach()
        piece = Piece(names[0], tuple(value.shape), tied=names[1:], trained=parameter.requires_grad)
        yield Held(piece, value, None if gradient is None else gradient.detach())


def is_engine(module: torch.nn.Module) -> bool:
    """Whether a module sums and steps in methods of its own: DeepSpeed's engine, or ZeRO's of ours."""
    return is_deepspeed(module) or engines.is_ours(module)


def is_deepspeed(module: torch.nn.Module) -> bool:
    """Whether a module is an engine of DeepSpeed's, and not one of its layers."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(module, deepspeed.DeepSpeedEngine)


def _of_root(root: torch.nn.Module, gradients: bool) -> Iterator[Held]:
    tied = names_of(root)
    if is_deepspeed(root):
        yield from _deepspeed(root, tied, gradients)
        return
    if sharded := _fsdp1(root):
        yield from sharded
        return
    if engines.is_ours(root):
        yield from _zero(root, tied, gradients)
        return
    for parameter, names in tied.values():
        yield _plain(parameter, names)


def names_of(root: torch.nn.Module) -> dict[int, tuple[torch.nn.Parameter, tuple[str, ...]]]:
    """A model's parameters by their ids, each with all its names, without wrappers."""
    found: dict[int, tuple[torch.nn.Parameter, tuple[str, ...]]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        known = found.get(id(parameter), (parameter, ()))[1]
        found[id(parameter)] = (parameter, (*known, without_wrappers(name)))
    return found


def _plain(parameter: torch.nn.Parameter, names: tuple[str, ...]) -> Held:
    gradient: Any = parameter.grad
    if gradient is None:
        gradient = getattr(parameter, "main_grad", None)  # Megatron-core's buffers
    whole = start = None
    value: Any = parameter.detach()
    own: Any = parameter
    if _is_dtensor(own):
        whole, start = tuple(parameter.shape), _box(parameter)
        value = compat.local_tensor(parameter).detach()
        if gradient is not None and _is_dtensor(gradient):
            if gradient.placements != own.placements:  # a part of a sum, or whole where the parameter is cut
                gradient = gradient.redistribute(own.device_mesh, own.placements)
            gradient = compat.local_tensor(gradient)
    if gradient is not None and gradient.is_sparse:
        gradient = gradient.to_dense()
    piece = Piece(names[0], tuple(value.shape), whole, start, None, names[1:], parameter.requires_grad)
    return Held(piece, value, None if gradient is None else gradient.detach())


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _box(parameter: Any) -> tuple[int, ...]:
    """Where a DTensor's local part begins in the whole, an index for each axis."""
    return tuple(compat.local_offset(parameter.shape, parameter.device_mesh, parameter.placements))


def _fsdp1(root: torch.nn.Module) -> list[Held]:
    """The parameters of FSDP1's units as ranges of their elements, as far as this rank has them."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    found: list[Held] = []
    for name, part in root.named_modules() if fsdp is not None else ():
        if not isinstance(part, fsdp.FullyShardedDataParallel):
            continue
        for own, whole, begin, value, gradient in compat.fsdp1_ranges(part):
            full = without_wrappers(f"{name}.{own}" if name else own)
            found.append(Held(Piece(full, tuple(value.shape), tuple(whole), None, begin), value, gradient))
    return found


def _deepspeed(
    engine: Any, tied: dict[int, tuple[torch.nn.Parameter, tuple[str, ...]]], gradients: bool
) -> Iterator[Held]:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    zero = engine.zero_optimization_stage() > 0
    for parameter, names in tied.values():
        trained = parameter.requires_grad
        gradient = safe_get_full_grad(parameter) if trained and gradients else None
        value = safe_get_full_fp32_param(parameter) if trained and zero else None
        if value is None:
            with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):  # frozen, and cut at stage 3
                value = parameter.detach().clone()
        piece = Piece(names[0], tuple(value.shape), tuple(value.shape), None, None, names[1:], trained)
        yield Held(piece, value, gradient)


def _zero(engine: Any, tied: dict[int, tuple[torch.nn.Parameter, tuple[str, ...]]], gradients: bool) -> Iterator[Held]:
    kept = {id(parameter): (value, gradient) for parameter, value, gradient in engines.whole(engine, gradients)}
    for parameter, names in tied.values():
        if id(parameter) not in kept:  # frozen at stages 1 and 2
            yield _plain(parameter, names)
            continue
        value, gradient = kept[id(parameter)]
        shape = tuple(value.shape)
        yield Held(Piece(names[0], shape, shape, None, None, names[1:], parameter.requires_grad), value, gradient)
