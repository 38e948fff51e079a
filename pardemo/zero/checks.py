"""What the engines refuse, in one line each."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.groups import cut_within
from pardemo.zero.running import Running
from pardemo.zero.unit import Unit

DTYPES = (torch.bfloat16, torch.float32)


def refused(module: nn.Module, group: dist.ProcessGroup) -> Exception | None:
    """Why this rank cannot keep the module; not raised, since the other ranks would wait for this one."""
    try:
        check_module(module)
        check_groups(module, group)
    except (ValueError, RuntimeError) as error:
        return error
    return None


def check_module(module: nn.Module) -> None:
    """ValueError for a module without anything to train, or with parameters that an engine cannot keep."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the module has no parameter that requires a gradient: nothing to train")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:  # fp16 needs loss scaling, which is not here
            raise ValueError(f"{name} is {parameter.dtype}; trained parameters are bfloat16 or float32")
        if not parameter.numel():
            raise ValueError(f"{name} is empty: are its values in the shards of an engine that was not closed?")
    check_hooks(module, module.parameters())


def check_hooks(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """RuntimeError for hooks that would use or change a rank's own gradient as if it were the mean, such as an
    optimizer's step in backward. The meters' only look."""
    with compat.without_functions():
        for parameter in parameters:
            for hook in compat.accumulate_hooks(parameter).values():
                if not (getattr(hook, "__module__", None) or "").startswith("pardemo."):  # a bound method of C's
                    name = next(name for name, p in module.named_parameters() if p is parameter)
                    raise RuntimeError(
                        f"{name} has a hook of register_post_accumulate_grad_hook(): the gradient that it sees is this "
                        "rank's own and not the mean; remove it, and do what it does between backward() and step()"
                    )


def check_groups(module: nn.Module, group: dist.ProcessGroup) -> None:
    """ValueError where tensor-parallel ranks, each with its own part of a layer, would be given rank 0's."""
    if problem := cut_within(module, group):
        raise ValueError(problem)


def check_optimizer(optimizer: torch.optim.Optimizer, trained: Sequence[Unit]) -> None:
    """ValueError where the optimizer was not made from the shards that it was given."""
    has = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    if has != {id(unit.master): unit.settings for unit in trained}:
        raise ValueError("the optimizer has other parameters or groups than it was given: make it from its argument")


def check_in_place(engine: Running) -> None:
    """RuntimeError where parameters were moved, replaced, (un)frozen, or given gradients by hand."""
    known = {parameter: unit for unit in engine.units for parameter in unit.parameters}
    for name, parameter in engine.module.named_parameters():
        unit = known.get(parameter)
        if unit is None and (parameter.requires_grad or engine.stage == 3):
            raise RuntimeError(f"{name} was replaced or unfrozen after the engine was made: close() the engine before")
        if unit is None:
            continue
        if parameter.requires_grad and not unit.trained:
            raise RuntimeError(f"{name} was unfrozen after the engine was made: close() the engine before")
        if unit.trained and not parameter.requires_grad:
            raise RuntimeError(
                f"{name} was frozen after the engine was made, which would go on with it: close() the engine before"
            )
        if engine.stage > 1 and parameter.grad is not None and not engine.gradients.is_shown(parameter):
            raise RuntimeError(f"{name}.grad was set by hand: stage {engine.stage} takes gradients in backward() only")
    for unit in engine.units:
        if unit.resident and not unit.shows():
            raise RuntimeError("parameters were moved after the engine was made (to(), half(), …): close() it before")
