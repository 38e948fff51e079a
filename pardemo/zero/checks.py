"""What the engines refuse, in one line each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from pardemo.zero.gradient_norm import cut_parameters
from pardemo.zero.unit import Unit

if TYPE_CHECKING:
    from pardemo.zero.engine import Engine

DTYPES = (torch.bfloat16, torch.float32)


def check_module(module: nn.Module) -> None:
    """ValueError for a module without anything to train, or with parameters that an engine cannot keep."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the module has no parameter that requires a gradient: nothing to train")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:  # fp16 needs loss scaling, which is not here
            raise ValueError(f"{name} is {parameter.dtype}; trained parameters are bfloat16 or float32")
        if not parameter.numel():
            raise ValueError(f"{name} is empty: are its values in the shards of an engine that was not closed?")


def check_groups(module: nn.Module, group: dist.ProcessGroup) -> None:
    """ValueError where tensor-parallel ranks, each with its own part of a layer, would be given rank 0's."""
    _, tensor_parallel = cut_parameters(module)
    if tensor_parallel is None:
        return
    cut, ours = (dist.get_process_group_ranks(g) for g in (tensor_parallel, group))
    if len(set(cut) & set(ours)) > 1:
        raise ValueError(
            f"layers are cut over ranks {cut}, and the engine's group is {ours}: give it the data-parallel one"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, trained: Sequence[Unit]) -> None:
    """ValueError where the optimizer was not made from the shards that it was given."""
    has = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    if has != {id(unit.master): unit.settings for unit in trained}:
        raise ValueError("the optimizer has other parameters or groups than it was given: make it from its argument")


def check_in_place(engine: "Engine") -> None:
    """RuntimeError where parameters were moved, replaced, unfrozen or given gradients that the engine does not see."""
    known = {parameter: unit for unit in engine.units for parameter in unit.parameters}
    for name, parameter in engine.module.named_parameters():
        unit = known.get(parameter)
        if unit is None and (parameter.requires_grad or engine.stage == 3):
            raise RuntimeError(f"{name} was replaced or unfrozen after the engine was made: close() the engine before")
        if unit is None:
            continue
        if parameter.requires_grad and not unit.trained:
            raise RuntimeError(f"{name} was unfrozen after the engine was made: close() the engine before")
        if engine.stage > 1 and parameter.grad is not None:
            raise RuntimeError(f"{name}.grad was set by hand: stage {engine.stage} takes gradients in backward() only")
    for unit in engine.units:
        if unit.resident and not unit.shows():
            raise RuntimeError("parameters were moved after the engine was made (to(), half(), …): close() it before")
