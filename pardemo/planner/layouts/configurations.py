"""Reads a model's configuration, built in or from a file, without Transformers; converts it to a shape."""

import json
import re
import tomllib
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from pardemo.planner.layouts.shape import COLUMNS, ROWS, Experts, Mamba, Product, Shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: Built-in models: what counts of the config.json that their makers publish on Hugging Face (mistral-7b: v0.3).
MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
#: What kinds of models have that their configurations do not say, and the keys that are read of these.
KINDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8"))
#: What Transformers fills in where a configuration does not say it.
USUAL = {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6}
#: What a name on the hub may end with and have the same sizes. (Mistral's v0.1 and v0.2 have a smaller vocabulary.)
_SAME_SIZES = re.compile(
    r"(-hf|-base|-chat|-chat-hf|-instruct|-v0\.3|-instruct-v0\.3|-it|-pt|(-instruct)?-v0\.1|-0324|-17b-\d+e(-instruct)?)$"
)


def key_of(name: str) -> str | None:
    """The built-in model of that name, its own or the hub's: ``meta-llama/Llama-3.1-8B-Instruct`` is llama3.1-8b.

    None where there is none, and where a folder has the name.
    """
    maker, _, model = name.lower().rpartition("/")
    if not maker:
        return model if model in MODELS else None
    if Path(name).expanduser().exists():
        return None
    base = model.removeprefix("meta-")
    if not base.startswith(tuple(KINDS["makers"].get(maker, ()))):
        return None
    if base.startswith("mistral-7b") and not base.endswith("-v0.3"):
        return None
    plain = _SAME_SIZES.sub("", base).replace("-", "")
    return next((key for key in MODELS if key.replace("-", "") == plain), None)


def not_planned(name: str) -> list[str]:
    """What the configuration of a folder or file says that a plan leaves out, one clause each."""
    values = _values(name)
    if not isinstance(values, dict):
        return []
    clauses = [clause for key, clause in KINDS["not_planned"].items() if values.get(key)]
    names = values.keys() | {key for value in values.values() if isinstance(value, dict) for key in value}
    if missing := [some[0] for some in KINDS["sizes"] if not names & set(some)]:
        kind = values.get("model_type", "the model type")
        clauses.append(
            f"its own {', '.join(missing)}, which it does not say: the defaults of Transformers for {kind} are"
        )
    return clauses


def _values(name: str) -> Any:
    """What the ``config.json`` of a folder, or a file, says; None where there is none that can be read."""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def find(name: str) -> "SimpleNamespace | PreTrainedConfig":
    """The configuration that :func:`pardemo.planner.models.find` returns; of a built-in model its sizes alone.

    Raises:
        ValueError: as :func:`pardemo.planner.models.find`.
        MissingExtra: a file is to be read, and Transformers is not installed.
    """
    if key := key_of(name):
        return SimpleNamespace(**MODELS[key])
    if (config := plain(_values(name))) is not None:  # that is all there is to know
        return config
    from pardemo.planner import models

    return models.find(name)


def plain(values: Any) -> SimpleNamespace | None:
    """The configuration that a ``config.json`` of such values is; None where Transformers has to read it."""
    if unsaid(values):
        return None
    return SimpleNamespace(**USUAL | {"tie_word_embeddings": False} | values)


def unsaid(values: Any) -> str:
    """Why the values of a ``config.json`` do not say all sizes themselves; "" where they do."""
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in KINDS["says_all"]:
        has = "it has no model_type" if kind is None else f"its model_type is {kind!r:.40}"
        return f"{has}, and configurations of {', '.join(sorted(KINDS['says_all']))} alone say all their sizes"
    for key in KINDS["asked"]:
        if type(values.get(key)) is not int or values[key] < 1:  # True is no size
            return f"{key} must be a whole number of at least 1, not {values.get(key)!r:.40}"
    for key in KINDS["optional"]:
        if type(values.get(key, 1)) not in (int, NoneType):
            return f"{key} must be a whole number, not {values[key]!r:.40}"
    # of some of the layers, which one derives; Qwen names a window that it does not use
    if values.get("sliding_window") and kind != "mistral" and values.get("use_sliding_window") is not False:
        return "which of its layers have the sliding window is not said"
    return ""


def of(config: "PreTrainedConfig") -> Shape:
    """The shape of a Hugging Face configuration, dense or with experts.

    Raises:
        ValueError: the sizes are not those of a transformer that is known; what is missing is named.
    """
    kind = config.model_type
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    sizes = {name: value_of(config, key) for name, key in (names | {"vocabulary": "vocab_size"}).items()}
    if missing := [name for name, value in sizes.items() if value is None]:
        raise ValueError(f"{kind}: no {' and no '.join(missing)} in its config; what is planned are transformers")
    if value_of(config, "is_encoder_decoder"):
        raise ValueError(f"{kind} has an encoder and a decoder; what is planned are decoders alone, as llama or gpt2")
    hidden, heads = sizes["hidden"], sizes["heads"]
    tied = bool(value_of(config, "tie_word_embeddings"))
    if kind == "nemotron_h":
        return _hybrid(config, sizes, tied)
    if mixer := KINDS["other_mixers"].get(kind):
        raise ValueError(f"{kind} has layers that are not attention ({mixer}); these are not planned")
    middle = value_of(
        config, "intermediate_size_mlp", "ffn_hidden_size", "intermediate_size", "ffn_dim", "n_inner", "inner_dim"
    )
    head = value_of(config, "head_dim") or hidden // heads
    rank = value_of(config, "kv_lora_rank")
    groups = value_of(config, "num_key_value_heads") or value_of(config, "num_kv_heads")
    one_group = value_of(config, "multi_query") and not value_of(config, "new_decoder_architecture")  # without a number
    return Shape(
        **sizes, groups=1 if one_group else groups or heads,
        middle=middle or 4 * hidden, gated=kind not in KINDS["two_products"], tied=tied,
        positions=(value_of(config, "max_position_embeddings") or 0) if kind in KINDS["learned_positions"] else 0,
        experts=_experts(config), name=kind, norms=4 if kind in KINDS["four_norms"] else 2,
        head_norms=kind.startswith(tuple(KINDS["head_norms"])),
        by_hand=value_of(config, "activation_function", "hidden_act") in ("gelu_new", "gelu_fast"),
        **{"head": head, "value": head} if rank is None else _latent(config, hidden, heads, rank),
        **_windows(config, sizes["layers"]),
    )  # fmt: skip


def value_of(config: "PreTrainedConfig | SimpleNamespace", *names: str) -> Any:
    """What a configuration says under the first of these names that it has; None where it has none."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _latent(config: "PreTrainedConfig", hidden: int, heads: int, rank: int) -> dict:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 2.1): low-rank products before those by heads."""
    rope, plain, value = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    low = getattr(config, "q_lora_rank", None)
    queries = heads * (plain + rope)
    to_queries = (Product(hidden, low), Product(low, queries, COLUMNS)) if low else (Product(hidden, queries, COLUMNS),)
    rest = (
        Product(hidden, rank + rope), Product(rank, heads * (plain + value), COLUMNS),
        Product(heads * value, hidden, ROWS),
    )  # fmt: skip
    return {"head": plain + rope, "value": value, "attention": (*to_queries, *rest)}


def _windows(config: "PreTrainedConfig", layers: int) -> dict[str, Any]:
    """How many layers see a part of the sequence alone, and how many tokens that is.

    ``layer_types`` says it layer by layer, where Transformers fills it in; Mistral's window is every layer's; Qwen's
    is of the layers from ``max_window_layers`` on, and of none unless ``use_sliding_window`` says so.
    """
    sliding = value_of(config, "sliding_window")
    window = sliding or value_of(config, "attention_chunk_size")
    if not window or value_of(config, "use_sliding_window") is False:
        return {}
    if types := value_of(config, "layer_types"):
        seen = sum(kind in ("sliding_attention", "chunked_attention") for kind in types)
    elif (pattern := value_of(config, "sliding_window_pattern")) and pattern > 1:
        seen = layers - layers // pattern
    else:
        seen = layers - (value_of(config, "max_window_layers") or 0)
    return {"window": window, "windowed": max(0, min(seen, layers)), "chunked": not sliding}


def _hybrid(config: "PreTrainedConfig", sizes: dict[str, int], tied: bool) -> Shape:
    """Nemotron-H's layers: each is a Mamba-2 mixer, attention, an MLP or experts, as its pattern says."""
    pattern = config.hybrid_override_pattern
    mamba = Mamba(config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, config.n_groups,
                  config.conv_kernel)  # fmt: skip
    experts = None
    if "E" in pattern:
        shared = getattr(config, "moe_shared_expert_intermediate_size", 0) * (
            getattr(config, "n_shared_experts", 1) or 0
        )
        experts = Experts(config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size, shared)
    return Shape(
        **sizes,  # type: ignore[arg-type]
        groups=config.num_key_value_heads, middle=config.intermediate_size, gated=False, tied=tied,
        head=config.head_dim, experts=experts, name=config.model_type, pattern=pattern, mamba=mamba,
    )  # fmt: skip


def _experts(config: "PreTrainedConfig") -> Experts | None:
    count = value_of(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not count or count < 2:
        return None
    middle = value_of(config, "moe_intermediate_size", "expert_intermediate_size")
    middle = middle or value_of(config, "intermediate_size", "ffn_hidden_size")
    shared = value_of(config, "shared_expert_intermediate_size")
    if shared is None:
        shared = (value_of(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0) * middle
    if config.model_type.startswith("llama4"):  # one for all tokens, which no key of its configuration says
        shared = middle
    chosen = value_of(config, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts") or 2
    every = value_of(config, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    return Experts(
        count, chosen, middle, shared, value_of(config, "first_k_dense_replace") or 0, every,
        config.model_type == "gpt_oss",
    )  # fmt: skip


def usual_target(kind: str) -> tuple[str, ...] | None:
    """Where LoRA goes unless told otherwise in a model of that ``model_type``; None where that is not known here."""
    return tuple(KINDS["lora"].get(kind, ())) or None
