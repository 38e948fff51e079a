"""The model to plan for: a name, a folder or a config.json, read without running any code of it."""

import difflib
import json
from pathlib import Path

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from pardemo.baichuan2 import Baichuan2Config

#: Models that need no file. Sizes: the official configurations.
_LLAMA = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_QWEN = {"vocab_size": 152064, "rope_theta": 1e6, "max_position_embeddings": 32768}
BUILT_IN = {
    "baichuan2-7b": lambda: Baichuan2Config.b7(),
    "baichuan2-13b": lambda: Baichuan2Config.b13(),
    "llama2-7b": lambda: _sized("llama", 4096, 32, 32, 32, 11008, **_LLAMA),
    "llama2-13b": lambda: _sized("llama", 5120, 40, 40, 40, 13824, **_LLAMA),
    "llama2-70b": lambda: _sized("llama", 8192, 80, 64, 8, 28672, **_LLAMA),
    "qwen2.5-7b": lambda: _sized("qwen2", 3584, 28, 28, 4, 18944, **_QWEN),
    "qwen2.5-14b": lambda: _sized("qwen2", 5120, 48, 40, 8, 13824, **_QWEN),
    "qwen2.5-72b": lambda: _sized("qwen2", 8192, 80, 64, 8, 29568, **_QWEN),
}


def find(name: str) -> PreTrainedConfig:
    """The configuration of a built-in model, of a folder that has a ``config.json``, or of such a file.

    Raises:
        ValueError: no such model (the nearest names are offered); the configuration cannot be read, or needs code that
            comes with the model, which is never run.
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
    return _read(path)


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


def check_tensor_parallel(config: PreTrainedConfig, tp: int) -> None:
    """Raises ValueError where the heads do not divide by ``tp``."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    for name, count in (("attention heads", heads), ("key-value heads", groups)):
        if count % tp:
            fits = [n for n in range(1, heads + 1) if heads % n == 0 and groups % n == 0]
            raise ValueError(f"{count} {name} do not divide by --tp {tp}; {', '.join(map(str, fits))} would do")


def _sized(kind: str, hidden: int, layers: int, heads: int, groups: int, middle: int, **more) -> PreTrainedConfig:
    return CONFIG_MAPPING[kind](
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=middle, tie_word_embeddings=False, **more,
    )  # fmt: skip
