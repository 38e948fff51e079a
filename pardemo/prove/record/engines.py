"""On a rank: ZeRO's engines of ours, which sum and step in a method of their own, and keep gradients in shards."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from pardemo import compat
from pardemo.prove.record.facts import Clip


def is_ours(module: torch.nn.Module) -> bool:
    """Whether a module is one of :mod:`pardemo.zero`'s engines."""
    zero = sys.modules.get("pardemo.zero.engine")
    return zero is not None and isinstance(module, zero.Engine)


def whole(engine: Any, gradients: bool) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor | None]]:
    """Each parameter that an engine keeps, its values and its gradient, the ranks' mean, in whole. Collective."""
    of_parameters = _gradients(engine) if gradients else {}
    with engine.whole():
        for unit in engine.units:
            for parameter in unit.parameters:
                yield parameter, parameter.detach().clone(), of_parameters.get(id(parameter))


def _gradients(engine: Any) -> dict[int, torch.Tensor]:
    if engine.stage == 1:
        engine.average_gradients()
        units = [(unit, unit.views(unit.sum)) for unit in engine.trained]
        return {id(p): view.clone() for unit, views in units for p, view in zip(unit.parameters, views, strict=True)}
    found: dict[int, torch.Tensor] = {}
    for unit in engine.trained:
        if unit.gradient is not None:
            flat = unit.gradient.new_zeros(unit.chunk * engine.size)
            flat[unit.rank * unit.chunk : (unit.rank + 1) * unit.chunk] = unit.gradient / engine.size
            engine.exchange(flat, f"{unit.name}, gradients that are written down")
            found |= {id(p): view for p, view in zip(unit.parameters, unit.views(flat), strict=True)}
    return found


def stepping(
    engine: type, before: Callable[[], None], after: Callable[[list[float], list[Clip]], None]
) -> AbstractContextManager[None]:
    """Within the block ``before`` is called before each step of an engine's, and ``after`` behind it.

    ``after`` gets the learning rates, and the norm by which the engine clipped.
    """
    step = engine.step  # type: ignore[attr-defined]

    def recorded(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            return step(self, closure)  # which comes here again, without it
        before()
        norm = step(self)
        clips = [Clip(float(norm), float(self.max_norm), "")] if norm is not None else []
        after([float(group["lr"]) for group in self.optimizer.param_groups], clips)
        return norm

    return compat.replaced(engine, "step", recorded)
