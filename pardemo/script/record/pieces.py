"""Lists the pieces that a rank holds of its models' parameters, with their values and gradients."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pardemo import compat
from pardemo.script.record.rank_record import ParameterShard
from pardemo.script.runtime.call_sites import without_wrappers
from pardemo.script.runtime.hooks import is_deepspeed

#: A model's parameters by their ids, each with all its names, without wrappers.
Names = Mapping[int, tuple[torch.nn.Parameter, tuple[str, ...]]]


def is_pardemo_engine(module: torch.nn.Module) -> bool:
    """Whether a module is one of :mod:`pardemo.zero`'s engines."""
    zero = sys.modules.get("pardemo.zero.engine")
    return zero is not None and isinstance(module, zero.Engine)


def is_engine(module: torch.nn.Module) -> bool:
    """Whether a module sums and steps in methods of its own: DeepSpeed's engine, or ZeRO's of ours."""
    return is_deepspeed(module) or is_pardemo_engine(module)


class HeldPiece(NamedTuple):
    """A piece with its values on this rank, and its gradient or None, both as plain tensors."""

    piece: ParameterShard
    value: torch.Tensor
    gradient: torch.Tensor | None


def held_pieces(
    roots: Iterable[torch.nn.Module],
    in_no_model: Iterable[tuple[str, torch.nn.Parameter]] = (),
    *,
    gradients: bool = True,
    at_hand: bool = False,
) -> list[HeldPiece]:
    """Lists all parameters of this rank's models: DTensor's, FSDP's, DeepSpeed's, Megatron's, or plain ones.

    DeepSpeed's and those of ZeRO of ours are gathered, for which all ranks have to come here.

    Args:
        in_no_model: parameters that no model has, with their names.
        gradients: False after a step, when DeepSpeed has none any more.
        at_hand: what is there in the middle of a step, as far as it needs no collective: nothing of engines that keep
            shards.
    """
    pieces: dict[str, HeldPiece] = {}
    of_class: Counter[str] = Counter()
    for root in roots:
        kind = type(root).__name__
        of_class[kind] += 1
        prefix = f"{kind}." if of_class[kind] == 1 else f"{kind}.{of_class[kind]}."
        for held in _pieces_of(root, gradients, at_hand):
            name = held.piece.name if held.piece.name not in pieces else prefix + held.piece.name
            pieces[name] = held._replace(piece=replace(held.piece, name=name))
    return [*pieces.values(), *(_plain_piece(parameter, (name,), at_hand) for name, parameter in in_no_model)]


def _pieces_of(root: torch.nn.Module, gradients: bool, at_hand: bool) -> Iterator[HeldPiece]:
    names, units = parameter_names(root), _fsdp1_units(root)
    if at_hand and (units or is_engine(root)):
        return  # gradients are whole, or none, until the last micro-batch
    if is_deepspeed(root):
        yield from _deepspeed_pieces(names, root.zero_optimization_stage() > 0, gradients)  # type: ignore[operator]
    elif units:
        yield from _fsdp1_pieces(units)
    elif is_pardemo_engine(root):
        yield from _zero_pieces(root, names, gradients)
    else:
        yield from (_plain_piece(parameter, known, at_hand) for parameter, known in names.values())


def parameter_names(root: torch.nn.Module) -> Names:
    """Returns a model's parameters by their ids, each with all its names, without wrappers."""
    names: dict[int, tuple[torch.nn.Parameter, tuple[str, ...]]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        known = names.get(id(parameter), (parameter, ()))[1]
        names[id(parameter)] = (parameter, (*known, without_wrappers(name)))
    return names


def _plain_piece(parameter: Any, names: tuple[str, ...], at_hand: bool = False) -> HeldPiece:
    gradient = parameter.grad
    if gradient is None:
        gradient = getattr(parameter, "main_grad", None)  # Megatron-core's buffers
    value, shape, start = parameter, None, None
    if _is_dtensor(parameter):
        mesh, placements = parameter.device_mesh, parameter.placements
        value, shape = compat.local_tensor(parameter), tuple(parameter.shape)
        start = tuple(compat.local_offset(parameter.shape, mesh, placements))
        if _is_dtensor(gradient) and gradient.placements != placements:  # a part of a sum, or whole where it is cut
            gradient = None if at_hand else gradient.redistribute(mesh, placements)
    if _is_dtensor(gradient):
        gradient = compat.local_tensor(gradient)
    if gradient is not None and gradient.is_sparse:
        gradient = None if at_hand else gradient.to_dense()
    piece = ParameterShard(names[0], tuple(value.shape), shape, start, tied=names[1:])
    return HeldPiece(piece, value.detach(), None if gradient is None else gradient.detach())


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _fsdp1_units(root: torch.nn.Module) -> list[tuple[str, Any]]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    parts = root.named_modules() if fsdp is not None else ()
    return [(name, part) for name, part in parts if isinstance(part, fsdp.FullyShardedDataParallel)]


def _fsdp1_pieces(units: Iterable[tuple[str, Any]]) -> Iterator[HeldPiece]:
    """The parameters of FSDP1's units as ranges of their elements, as far as this rank has them."""
    for name, unit in units:
        for attribute, shape, begin, value, gradient in compat.fsdp1_ranges(unit):
            full = without_wrappers(f"{name}.{attribute}" if name else attribute)
            yield HeldPiece(ParameterShard(full, tuple(value.shape), tuple(shape), None, begin), value, gradient)


def _whole_piece(names: tuple[str, ...], value: torch.Tensor, gradient: torch.Tensor | None) -> HeldPiece:
    shape = tuple(value.shape)
    return HeldPiece(ParameterShard(names[0], shape, shape, tied=names[1:]), value, gradient)


def _deepspeed_pieces(names: Names, zero: bool, gradients: bool) -> Iterator[HeldPiece]:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    for parameter, known in names.values():
        trained = parameter.requires_grad
        gradient = safe_get_full_grad(parameter) if trained and gradients else None
        value = safe_get_full_fp32_param(parameter) if trained and zero else None
        if value is None:
            with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):  # frozen, and cut at stage 3
                value = parameter.detach().clone()
        yield _whole_piece(known, value, gradient)


def _zero_pieces(engine: Any, names: Names, gradients: bool) -> Iterator[HeldPiece]:
    """Yields what an engine of ours keeps flat, values and the ranks' mean gradient in whole; collective.

    Frozen parameters are kept as they are, and stage 3's are DTensors, as FSDP2's.
    """
    kept: dict[int, torch.Tensor | None] = {}
    for unit in engine.units if engine.stage < 3 else ():
        flat = torch.zeros_like(unit.flat)  # of this rank's part, or chunk, of the sum
        with torch.no_grad(), compat.without_functions():
            if engine.stage == 1:
                for parameter, view in zip(unit.parameters, unit.views(flat), strict=True):
                    if parameter.grad is not None:
                        view.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            elif unit.gradient is not None:
                flat[unit.rank * unit.chunk :][: unit.chunk] = unit.gradient
        if gradients:
            exchange = engine.channel.submit(
                engine.channel.all_reduce, flat, f"{unit.name}, gradients that are written down, {engine.now}"
            )
            flat = exchange.result() / engine.size
        for parameter, view in zip(unit.parameters, unit.views(flat), strict=True):
            kept[id(parameter)] = view if gradients else None
    for key, (parameter, known) in names.items():
        if key in kept:
            yield _whole_piece(known, parameter.detach().clone(), kept[key])
        else:
            yield _plain_piece(parameter, known)
