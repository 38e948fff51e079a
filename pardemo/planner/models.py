"""Reads the model to plan for: a name, a folder or a config.json, without running any code of it."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from pardemo import extras, project

with extras.needed_by(__name__):
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

import pardemo.baichuan2  # noqa: F401, registers the model
from pardemo.finetune import lora
from pardemo.planner.dry_run.engines import outline
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.configurations import KINDS, MODELS, config_file, key_of, value_of


def find(name: str) -> PreTrainedConfig:
    """Returns the configuration of a built-in model, of a folder that has a ``config.json``, or of such a file.

    A built-in model has its name on Hugging Face, too (``Qwen/Qwen2.5-7B``), where there is no folder of that name.

    Of a model that sees or hears as well (Gemma 3, Qwen2.5-VL) it is the language model's: the rest is not planned.

    Raises:
        ValueError: no such model (the nearest names are offered); the configuration cannot be read, has no attention,
            or needs code that comes with the model, which is never run.
    """
    if key := key_of(name):
        values = dict(MODELS[key])
        return CONFIG_MAPPING[values.pop("model_type")](**values)
    path = config_file(name)
    config = _read(path).get_text_config()
    if not hasattr(type(config), "num_attention_heads") and value_of(config, "num_attention_heads") is None:
        raise ValueError(f"{path}: {config.model_type} has no attention heads; what is planned are transformers")
    if config.model_type not in KINDS["exact"]:
        config.counted = count(config)
    return config


def count(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Parameters of the model that Transformers makes of a configuration, counted on the meta device.

    Returns:
        ``all``; ``matrices`` outside of experts; ``experts``: theirs; ``unknown``: names of matrices of a layer that no
        part of a :class:`~pardemo.planner.layouts.shape.Shape` has. None where there is no causal language model.
    """
    try:
        model = outline(RankJob(config))
    except ValueError:
        return None
    except Exception as error:  # of sizes that do not go together Transformers raises many kinds
        reason = project.one_line(f"{type(error).__name__}: {error}", 160)
        raise ValueError(f"{config.model_type}: Transformers makes no model of this configuration ({reason})") from None
    counts = {"all": 0, "matrices": 0, "experts": 0}
    known = {name for names in KINDS["modules"].values() for name in names}
    unknown: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight").split(".")
        of_experts = ".experts" in name
        counts["all"] += parameter.numel()
        if parameter.ndim == 2 or (of_experts and parameter.ndim > 2):
            counts["experts" if of_experts else "matrices"] += parameter.numel()
            if re.search(r"\.\d+\.", name) and not of_experts and path[-1] not in known:
                matrix = ".".join(path[-2:])
                unknown[matrix] = unknown.get(matrix, 0) + parameter.numel()
    largest = sorted(unknown, key=lambda name: -unknown[name])[:3]
    return counts | {"unknown": largest}


def _read(path: Path) -> PreTrainedConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind = values["model_type"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a model's config.json: it has no model_type") from None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
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
        raise ValueError(f"{path}: {project.one_line(error, 160)}") from None


#: Names that queries and values go by, apart or in one matrix.
_ATTENTION = (("q_proj", "v_proj"), ("qkv_proj",), ("query_key_value",), ("Wqkv",), ("c_attn",))


def lora_target(config: PreTrainedConfig) -> tuple[str, ...]:
    """Returns the modules that LoRA goes to by default: PEFT's for the architecture, else queries' and values'.

    Raises:
        ValueError: neither is known.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFTS

    if config.model_type in PEFTS:
        return tuple(PEFTS[config.model_type])
    linear = lora.linear_names(outline(RankJob(config)))
    for names in _ATTENTION:
        if linear.issuperset(names):
            return names
    raise ValueError(f"{config.model_type}: name LoRA's modules (--target) among {', '.join(sorted(linear))}")
