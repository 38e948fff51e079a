"""Sizes of models that need no file: layouts are planned from them without Transformers."""

import json
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from pardemo.planner.layouts.model.built_in_sizes import OTHERS, SIZES, USUAL, key_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: What a configuration may say that is not planned, and how it is told.
_NOT_PLANNED = {
    "vision_config": "what sees (vision_config)",
    "audio_config": "what hears (audio_config)",
    "quantization_config": "weights in few bits (quantization_config): they are reckoned as bf16",
}


#: What a configuration has to say of a model's size, by any of its names.
_SIZES = (
    ("hidden_size", "n_embd", "d_model", "dim"), ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_attention_heads", "n_head", "n_heads"), ("vocab_size",),
)  # fmt: skip


def not_planned(name: str) -> list[str]:
    """What the configuration of a folder or file says that a plan leaves out, one clause each."""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return []
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(values, dict):
        return []
    told = [told for key, told in _NOT_PLANNED.items() if values.get(key)]
    names = values.keys() | {key for value in values.values() if isinstance(value, dict) for key in value}
    if missing := [some[0] for some in _SIZES if not names & set(some)]:
        kind = values.get("model_type", "the model type")
        told.append(f"its own {', '.join(missing)}, which it does not say: the defaults of Transformers for {kind} are")
    return told


def find(name: str) -> "SimpleNamespace | PreTrainedConfig":
    """The configuration that :func:`pardemo.planner.models.find` returns; of a built-in model its sizes alone.

    Raises:
        ValueError: as :func:`pardemo.planner.models.find`.
        MissingExtra: a file is to be read, and Transformers is not installed.
    """
    key = key_of(name, (*SIZES, *OTHERS))
    if key is None or ("/" in name and Path(name).expanduser().exists()):
        if (plain := _plain(name)) is not None:
            return plain
        from pardemo.planner import models

        return models.find(name)
    if key in OTHERS:
        return SimpleNamespace(**OTHERS[key])
    kind, hidden, layers, heads, groups, middle, more = SIZES[key]
    return SimpleNamespace(**USUAL | {
        "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "intermediate_size": middle, "tie_word_embeddings": False, "rope_theta": 1e4,
    } | more)  # fmt: skip


#: Kinds of models whose ``config.json`` says by itself what Transformers would fill in, which takes seconds to load;
#: tests hold the two together.
SAYS_ALL = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3"}
_ASKED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_OPTIONAL = (
    "num_key_value_heads", "head_dim", "max_position_embeddings", "num_local_experts", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
)  # fmt: skip


def _plain(name: str) -> SimpleNamespace | None:
    """What a folder or file says itself, where that is all there is to know; None where Transformers has to read it."""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return plain(values)


def plain(values: Any) -> SimpleNamespace | None:
    """The configuration that a ``config.json`` of such values is; None where Transformers has to read it."""
    if unsaid(values):
        return None
    return SimpleNamespace(**USUAL | {"tie_word_embeddings": False} | values)


def unsaid(values: Any) -> str:
    """Why the values of a ``config.json`` do not say all sizes themselves; "" where they do."""
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in SAYS_ALL:
        has = "it has no model_type" if kind is None else f"its model_type is {kind!r:.40}"
        return f"{has}, and configurations of {', '.join(sorted(SAYS_ALL))} alone say all their sizes"
    for key in _ASKED:
        if type(values.get(key)) is not int or values[key] < 1:  # True is no size
            return f"{key} must be a whole number of at least 1, not {values.get(key)!r:.40}"
    for key in _OPTIONAL:
        if type(values.get(key, 1)) not in (int, NoneType):
            return f"{key} must be a whole number, not {values[key]!r:.40}"
    # of some of the layers, which one derives; Qwen names a window that it does not use
    if values.get("sliding_window") and kind != "mistral" and values.get("use_sliding_window") is not False:
        return "which of its layers have the sliding window is not said"
    return ""
