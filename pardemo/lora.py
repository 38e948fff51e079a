"""PEFT's settings for LoRA on named modules of a model: the same for the fine-tune and for the planner's dry run."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn


class Lora(Protocol):
    """A recipe's ``lora`` section, or a planned job's adapter."""

    target: Sequence[str]
    rank: int
    alpha: float
    dropout: float


def settings(lora: Lora, model: nn.Module) -> Any:
    """peft.LoraConfig.

    Raises:
        ValueError: no linear module of the model has such a name.
    """
    from peft import LoraConfig

    known = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    if unknown := [name for name in lora.target if name not in known]:
        raise ValueError(f"lora.target: no module is called {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target),
        task_type="CAUSAL_LM",
    )
