"""On a rank: what a step begins with beside parameters: the optimizer's states."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pardemo import compat

#: The kind of states that no optimizer has: of what the script keeps beside the model.
KEPT = "kept"
#: Optimizers' names for what they keep, in words.
SLOTS = {
    "exp_avg": "the optimizer's first moment", "exp_avg_sq": "the optimizer's second moment",
    "momentum_buffer": "the optimizer's momentum", "max_exp_avg_sq": "the optimizer's largest second moment",
    "step": "the optimizer's count of steps", "square_avg": "the optimizer's mean of squares",
    "sum": "the optimizer's sum of squares", KEPT: "what the script keeps beside the model",
}  # fmt: skip


class Optimizers:
    """All optimizers of torch's that were made, or read from a file, since this was; in their order."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []

    def noted(self, begin: Any) -> Any:
        """``Optimizer.__init__`` or ``__setstate__``, which notes its optimizer."""

        def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            if not any(known() is optimizer for known in self._made):
                self._made.append(weakref.ref(optimizer))

        return made

    def states(self, names: Mapping[int, str]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Of each parameter that is stepped its name, and each state: what it is called, and this rank's part.

        ``names``: of the models' parameters, by their ids. Others are called by where they are in their optimizer.
        """
        living = [optimizer for reference in self._made if (optimizer := reference()) is not None]
        for number, optimizer in enumerate(living):
            for place, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    name = names.get(id(parameter), f"optimizer {number}.{place}.{index}")
                    for slot, value in optimizer.state.get(parameter, {}).items():
                        if (tensor := _plain(value)) is not None:
                            yield name, str(slot), tensor


def _plain(value: Any) -> torch.Tensor | None:
    """A copy of this rank's part of a state, or None of what is no number."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, torch.Tensor):
        return None
    part = compat.local_tensor(value) if hasattr(value, "placements") else value
    return part.detach().cpu().clone().contiguous()
