"""An optimizer's parameter groups, over shards in place of parameters."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

#: What an optimizer is made from: parameters, or groups of them with settings.
Shards = list[nn.Parameter] | list[dict[str, Any]]
MakeOptimizer = Callable[[Shards], torch.optim.Optimizer]


class ParamGroups:
    """Assigns trained parameters to ``param_groups``; one group without settings where that is None.

    Raises:
        ValueError: a trained parameter in no group or in two, one that is not the module's, a group without "params".
    """

    def __init__(self, module: nn.Module, param_groups: Sequence[dict[str, Any]] | None):
        self._given = param_groups is not None
        names = {p: name for name, p in module.named_parameters()}
        #: each group's settings, such as ``{"weight_decay": 0.0}``
        self.settings = [{"params": list(names)}] if param_groups is None else [dict(group) for group in param_groups]
        self._number: dict[nn.Parameter, int] = {}
        for number, group in enumerate(self.settings):
            if "params" not in group:
                raise ValueError(f'param_groups[{number}] has no "params"')
            params: Any = group.pop("params")
            listed: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
            for parameter in listed:
                if parameter not in names:
                    raise ValueError(f"param_groups[{number}] has a parameter that is not the module's")
                if parameter in self._number:
                    raise ValueError(f"{names[parameter]} is in more than one of param_groups")
                self._number[parameter] = number
        for parameter, name in names.items():
            if parameter.requires_grad and parameter not in self._number:
                raise ValueError(f"{name} requires a gradient and is in none of param_groups: it would not be trained")

    def number(self, parameter: nn.Parameter) -> int:
        """Returns the number of the parameter's group; 0 where it is frozen and in none."""
        return self._number.get(parameter, 0)

    def shards(self, numbered: Iterable[tuple[int, nn.Parameter]]) -> Shards:
        """Returns what the optimizer is made from: groups where there were groups, else a list."""
        numbered = list(numbered)
        if not self._given:
            return [shard for _, shard in numbered]
        return [
            {"params": [shard for index, shard in numbered if index == number], **settings}
            for number, settings in enumerate(self.settings)
        ]
