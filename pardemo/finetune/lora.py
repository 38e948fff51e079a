"""PEFT's settings for LoRA on named modules of a model: the same for the fine-tune and for the planner's dry run."""

from collections.abc import Sequence
from typing import Any

from torch import nn


def config(model: nn.Module, target_modules: Sequence[str], **settings: Any) -> Any:
    """peft.LoraConfig of ``r``, ``lora_alpha``, ``lora_dropout`` and what else it takes.

    Raises:
        ValueError: no linear module of the model has such a name.
    """
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, its weight [in, out]

    names = linear_names(model)
    if unknown := [name for name in target_modules if name not in names]:
        raise ValueError(
            f"lora.target_modules: no module is called {unknown[0]!r}; there are {', '.join(sorted(names))}"
        )
    turned = linear_names(model, Conv1D).intersection(target_modules)
    return LoraConfig(
        target_modules=list(target_modules), fan_in_fan_out=bool(turned), task_type="CAUSAL_LM", **settings
    )


def linear_names(model: nn.Module, *kinds: type[nn.Module]) -> set[str]:
    """The last names of the model's linear modules: where LoRA can go. ``kinds`` to ask for those alone.

    Not those that compute something else of their weight, as Baichuan2's head does: B·A beside them is not B·A in it.
    """
    from transformers.pytorch_utils import Conv1D

    modules = ((name.rpartition(".")[2], part) for name, part in model.named_modules())
    linear = [kind.forward for kind in kinds or (nn.Linear, Conv1D)]
    return {name for name, part in modules if type(part).forward in linear}
