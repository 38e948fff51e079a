"""PEFT's settings for LoRA on named modules of a model: the same for the fine-tune and for the planner's dry run."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn


class Lora(Protocol):
    """A recipe's ``lora`` section, or a planned job's adapter; neither can be changed."""

    @property
    def target(self) -> Sequence[str]: ...
    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def dropout(self) -> float: ...


def settings(lora: Lora, model: nn.Module) -> Any:
    """peft.LoraConfig.

    Raises:
        ValueError: no linear module of the model has such a name.
    """
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, its weight [in, out]

    names = linear_names(model)
    if unknown := [name for name in lora.target if name not in names]:
        raise ValueError(f"lora.target: no module is called {unknown[0]!r}; there are {', '.join(sorted(names))}")
    turned = linear_names(model, Conv1D).intersection(lora.target)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target),
        fan_in_fan_out=bool(turned),
        task_type="CAUSAL_LM",
    )


def linear_names(model: nn.Module, *kinds: type[nn.Module]) -> set[str]:
    """The last names of the model's linear modules: where LoRA can go. ``kinds`` to ask for those alone.

    Not those that compute something else of their weight, as Baichuan2's head does: B·A beside them is not B·A in it.
    """
    from transformers.pytorch_utils import Conv1D

    modules = ((name.rpartition(".")[2], part) for name, part in model.named_modules())
    linear = [kind.forward for kind in kinds or (nn.Linear, Conv1D)]
    return {name for name, part in modules if type(part).forward in linear}
