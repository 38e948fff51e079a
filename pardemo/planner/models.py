"""The model to plan for: a name, a folder or a config.json, read without running any code of it."""

import difflib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from pardemo.baichuan2 import Baichuan2Config
from pardemo.finetune import lora
from pardemo.planner.engines import outline
from pardemo.planner.job import Job


def _sized(
    kind: str, hidden: int, layers: int, heads: int, groups: int, middle: int, more: dict[str, Any]
) -> PreTrainedConfig:
    return CONFIG_MAPPING[kind](
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=middle, **({"tie_word_embeddings": False} | more),
    )  # fmt: skip


_LLAMA_2 = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_LLAMA_3 = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 8192}
_LLAMA_31 = _LLAMA_3 | {"max_position_embeddings": 131072}
_MISTRAL = {"vocab_size": 32768, "rope_theta": 1e6, "max_position_embeddings": 32768, "sliding_window": None}
_QWEN_25 = {"vocab_size": 152064, "rope_theta": 1e6, "max_position_embeddings": 32768}
_QWEN_3 = {"vocab_size": 151936, "rope_theta": 1e6, "max_position_embeddings": 40960, "head_dim": 128}
_TIED = {"tie_word_embeddings": True}  # the head is the embedding
_SMALL_QWEN = {"vocab_size": 151936} | _TIED

#: Models that need no file: architecture, hidden size, layers, heads, key-value heads, width of the MLP, and the rest
#: that counts. Each from the config.json that its makers publish on Hugging Face (meta-llama, mistralai, Qwen, openai).
_SIZES: dict[str, tuple[str, int, int, int, int, int, dict[str, Any]]] = {
    "llama2-7b": ("llama", 4096, 32, 32, 32, 11008, _LLAMA_2),
    "llama2-13b": ("llama", 5120, 40, 40, 40, 13824, _LLAMA_2),
    "llama2-70b": ("llama", 8192, 80, 64, 8, 28672, _LLAMA_2),
    "llama3-8b": ("llama", 4096, 32, 32, 8, 14336, _LLAMA_3),
    "llama3-70b": ("llama", 8192, 80, 64, 8, 28672, _LLAMA_3),
    "llama3.1-8b": ("llama", 4096, 32, 32, 8, 14336, _LLAMA_31),
    "llama3.1-70b": ("llama", 8192, 80, 64, 8, 28672, _LLAMA_31),
    "llama3.1-405b": ("llama", 16384, 126, 128, 8, 53248, _LLAMA_31),
    "llama3.2-1b": ("llama", 2048, 16, 32, 8, 8192, _LLAMA_31 | _TIED),
    "llama3.2-3b": ("llama", 3072, 28, 24, 8, 8192, _LLAMA_31 | _TIED),
    "mistral-7b": ("mistral", 4096, 32, 32, 8, 14336, _MISTRAL),  # v0.3
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 4864, _QWEN_25 | _SMALL_QWEN),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 8960, _QWEN_25 | _SMALL_QWEN),
    "qwen2.5-3b": ("qwen2", 2048, 36, 16, 2, 11008, _QWEN_25 | _SMALL_QWEN),
    "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 18944, _QWEN_25),
    "qwen2.5-14b": ("qwen2", 5120, 48, 40, 8, 13824, _QWEN_25),
    "qwen2.5-32b": ("qwen2", 5120, 64, 40, 8, 27648, _QWEN_25),
    "qwen2.5-72b": ("qwen2", 8192, 80, 64, 8, 29568, _QWEN_25),
    "qwen3-4b": ("qwen3", 2560, 36, 32, 8, 9728, _QWEN_3 | _TIED),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 12288, _QWEN_3),
    "qwen3-14b": ("qwen3", 5120, 40, 40, 8, 17408, _QWEN_3),
    "qwen3-32b": ("qwen3", 5120, 64, 64, 8, 25600, _QWEN_3),
}
BUILT_IN: dict[str, Callable[[], PreTrainedConfig]] = {
    "baichuan2-7b": Baichuan2Config.b7,
    "baichuan2-13b": Baichuan2Config.b13,
    "gpt2": CONFIG_MAPPING["gpt2"],  # the smallest; Transformers' defaults are its figures
    **{name: functools.partial(_sized, *sizes) for name, sizes in _SIZES.items()},
}


def find(name: str) -> PreTrainedConfig:
    """The configuration of a built-in model, of a folder that has a ``config.json``, or of such a file.

    Of a model that sees or hears as well (Gemma 3, Qwen2.5-VL) it is the language model's: the rest is not planned.

    Raises:
        ValueError: no such model (the nearest names are offered); the configuration cannot be read, has no attention,
            or needs code that comes with the model, which is never run.
    """
    if name.lower() in BUILT_IN:
        return BUILT_IN[name.lower()]()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        near = difflib.get_close_matches(name.lower(), BUILT_IN, 2, 0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(BUILT_IN)}"
        raise ValueError(f"no model {name!r}{hint} (or a folder with a config.json)")
    config = _read(path).get_text_config()
    if getattr(config, "num_attention_heads", None) is None:
        raise ValueError(f"{path}: {config.model_type} has no attention heads; what is planned are transformers")
    return config


def _read(path: Path) -> PreTrainedConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind = values["model_type"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not a model's config.json: it has no model_type") from None
    if kind not in CONFIG_MAPPING:
        why = "needs code that comes with the model, which pardemo never runs" if "auto_map" in values else "is unknown"
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), 1)
        raise ValueError(f"{path}: model_type {kind!r} {why}" + (f"; the nearest known is {near[0]}" if near else ""))
    try:
        return (
            AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
            if path.name == "config.json"
            else (CONFIG_MAPPING[kind].from_dict(values))
        )
    except Exception as error:  # Transformers raises many kinds, of huggingface_hub's own too
        raise ValueError(f"{path}: {' '.join(str(error).split())[:160]}") from None


#: Names that queries and values go by, apart or in one matrix.
_ATTENTION = (("q_proj", "v_proj"), ("qkv_proj",), ("query_key_value",), ("Wqkv",), ("c_attn",))


def lora_target(config: PreTrainedConfig) -> tuple[str, ...]:
    """Where LoRA goes unless told otherwise: PEFT's modules for the architecture, else what makes queries and values.

    Raises:
        ValueError: neither is known.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFTS

    if config.model_type in PEFTS:
        return tuple(PEFTS[config.model_type])
    known = lora.linear_names(outline(Job(config)))
    for names in _ATTENTION:
        if known.issuperset(names):
            return names
    raise ValueError(f"{config.model_type}: name LoRA's modules (--target) among {', '.join(sorted(known))}")


def check_tensor_parallel(config: PreTrainedConfig, tp: int) -> None:
    """Raises ValueError where the heads do not divide by ``tp``."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    for name, count in (("attention heads", heads), ("key-value heads", groups)):
        if count % tp:
            fits = [n for n in range(1, heads + 1) if heads % n == 0 and groups % n == 0]
            raise ValueError(f"{count} {name} do not divide by --tp {tp}; {', '.join(map(str, fits))} would do")
