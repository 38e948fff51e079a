"""Parameter groups in torch's own form, and units that hold parameters of one group only.

A shard is a piece of a unit, so that a weight decay for weights alone can be said only where weights and biases are
in units of their own.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pardemo.data_parallel.buckets import split_into_buckets

#: What an optimizer is made from: fp32 shards, or groups of them with settings.
Shards = Iterable[nn.Parameter] | list[dict[str, Any]]
MakeOptimizer = Callable[[Shards], torch.optim.Optimizer]


class ParamGroups:
    """Which trained parameter belongs to which of ``param_groups``; one group without settings where that is None.

    Raises:
        ValueError: a trained parameter in no group or in two, one that is not the module's, a group without "params".
    """

    def __init__(self, module: nn.Module, param_groups: Sequence[dict[str, Any]] | None):
        self.given = param_groups is not None
        names = {p: name for name, p in module.named_parameters()}
        groups = [dict(group) for group in param_groups] if self.given else [{"params": list(names)}]
        self._group_of: dict[nn.Parameter, int] = {}
        for number, group in enumerate(groups):
            if "params" not in group:
                raise ValueError(f'param_groups[{number}] has no "params"')
            params = group.pop("params")
            for parameter in [params] if isinstance(params, torch.Tensor) else params:
                if parameter not in names:
                    raise ValueError(f"param_groups[{number}] has a parameter that is not the module's")
                if parameter in self._group_of:
                    raise ValueError(f"{names[parameter]} is in more than one of param_groups")
                self._group_of[parameter] = number
        for parameter, name in names.items():
            if parameter.requires_grad and parameter not in self._group_of:
                raise ValueError(f"{name} requires a gradient and is in none of param_groups: it would not be trained")
        #: each group's settings, such as ``{"weight_decay": 0.0}``
        self.settings = groups

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """As an optimizer's: what ``GradScaler`` reads of an engine."""
        for number, settings in enumerate(self.settings):
            yield {"params": [p for p, of in self._group_of.items() if of == number and p.requires_grad], **settings}

    def number(self, parameter: nn.Parameter) -> int:
        """Of the parameter's group; 0 where it is frozen and in none."""
        return self._group_of.get(parameter, 0)

    def split(
        self, parameters: Sequence[nn.Parameter], bucket_bytes: float = math.inf
    ) -> list[tuple[int, list[nn.Parameter]]]:
        """Buckets of one group each, with its number, in the order in which a backward pass completes them."""
        place = {parameter: at for at, parameter in enumerate(reversed(parameters))}
        parts: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            parts.setdefault(self.number(parameter), []).append(parameter)
        buckets = [(number, b) for number, part in parts.items() for b in split_into_buckets(part, bucket_bytes)]
        return sorted(buckets, key=lambda bucket: max(place[parameter] for parameter in bucket[1]))

    def shards(self, shards: Sequence[tuple[int, nn.Parameter]]) -> Shards:
        """What the optimizer is made from: groups where there were groups, else a list."""
        if not self.given:
            return [shard for _, shard in shards]
        return [
            {"params": [shard for of, shard in shards if of == number], **settings}
            for number, settings in enumerate(self.settings)
        ]
