"""Calls back what follows a script when modules, optimizers and backward passes run."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pardemo import compat


class Hooks:
    """Calls a subclass's methods of the names below for all modules and optimizers while the block runs.

    ``following``: whatever else is to end with the block. ``also_raised``: whether ``_module_ends`` is called where a
    forward pass raises, too.
    """

    also_raised: ClassVar[bool] = False

    def __init__(self) -> None:
        self.following = contextlib.ExitStack()

    def __enter__(self) -> Self:
        hooks: dict[str, Callable[..., Any]] = {
            "_module_begins": register_module_forward_pre_hook,
            "_module_ends": functools.partial(register_module_forward_hook, always_call=self.also_raised),
            "_step_begins": register_optimizer_step_pre_hook,
            "_step_ends": register_optimizer_step_post_hook,
        }
        for name, register in hooks.items():
            if getattr(type(self), name) is not getattr(Hooks, name):
                self.following.callback(register(getattr(self, name)).remove)
        if type(self)._backward is not Hooks._backward:
            self.following.enter_context(compat.replaced(*compat.engine_replaced(self._backward)))
        return self

    def __exit__(self, *_: object) -> None:
        self.following.close()

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        """A module is called, with these positional arguments."""

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        """A module's forward pass has ended; what is returned takes the output's place, unless it is None."""

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer's ``step`` is called; what is returned takes the arguments' place, unless it is None."""

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A backward pass, which ``run(*args, **kwargs)`` runs; those within another one, too."""
        return run(*args, **kwargs)


def outermost(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Returns modules with parameters that are part of no other one, in the order in which they were met."""
    kept = [root for root in roots if next(root.parameters(), None) is not None]
    within = {id(part) for root in kept for part in root.modules() if part is not root}
    return [root for root in kept if id(root) not in within]


def is_deepspeed(module: torch.nn.Module) -> bool:
    """Whether a module is an engine of DeepSpeed's, and not one of its layers."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(module, deepspeed.DeepSpeedEngine)
