"""Sizes of models that need no file: layouts are planned from them without Transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from pardemo.planner.layouts.built_in_sizes import OTHERS, SIZES, USUAL, key_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def find(name: str) -> "SimpleNamespace | PreTrainedConfig":
    """The configuration that :func:`pardemo.planner.models.find` returns; of a built-in model its sizes alone.

    Raises:
        ValueError: as :func:`pardemo.planner.models.find`.
        MissingExtra: a file is to be read, and Transformers is not installed.
    """
    key = key_of(name, (*SIZES, *OTHERS))
    if key is None or ("/" in name and Path(name).expanduser().exists()):
        from pardemo.planner import models

        return models.find(name)
    if key in OTHERS:
        return SimpleNamespace(**OTHERS[key])
    kind, hidden, layers, heads, groups, middle, more = SIZES[key]
    return SimpleNamespace(**USUAL | {
        "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "intermediate_size": middle, "tie_word_embeddings": False, "rope_theta": 1e4,
    } | more)  # fmt: skip
