"""A model's configuration, built in or read from a file without Transformers, and the shape that it means."""

import json
import re
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from pardemo.planner.layouts.shape import COLUMNS, ROWS, Experts, Mamba, Product, Shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: Built-in models: what counts of the config.json that their makers publish on Hugging Face (mistral-7b: v0.3).
MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
#: What Transformers fills in where a configuration does not say it.
USUAL = {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6}
#: Who publishes the built-in models on Hugging Face, and what their names begin with. Others' models of the same name
#: may have other sizes.
_MAKERS = {
    "baichuan-inc": ("baichuan2",),
    "deepseek-ai": ("deepseek-v3",),
    "google": ("gemma-3",),
    "meta-llama": ("llama",),
    "microsoft": ("phi-4",),
    "mistralai": ("mistral", "mixtral"),
    "moonshotai": ("kimi-k2",),
    "openai": ("gpt-oss",),
    "openai-community": ("gpt2",),
    "qwen": ("qwen",),
    "zai-org": ("glm-4.5",),
}
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
    own = model.removeprefix("meta-")
    if maker not in _MAKERS or not own.startswith(_MAKERS[maker]):
        return None
    if own.startswith("mistral-7b") and not own.endswith("-v0.3"):
        return None
    plain = _SAME_SIZES.sub("", own).replace("-", "")
    return next((key for key in MODELS if key.replace("-", "") == plain), None)


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
    if key := key_of(name):
        return SimpleNamespace(**MODELS[key])
    if (plain := _plain(name)) is not None:
        return plain
    from pardemo.planner import models

    return models.find(name)


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


def of(config: "PreTrainedConfig") -> Shape:
    """The shape of a Hugging Face configuration, dense or with experts.

    Raises:
        ValueError: the sizes are not those of a transformer that is known; what is missing is named.
    """
    get = lambda *names: next((v for n in names if (v := getattr(config, n, None)) is not None), None)  # noqa: E731
    kind = config.model_type
    found = {
        "layers": get("num_hidden_layers"), "hidden": get("hidden_size"), "heads": get("num_attention_heads"),
        "vocabulary": get("vocab_size"),
    }  # fmt: skip
    if missing := [name for name, value in found.items() if value is None]:
        raise ValueError(f"{kind}: no {' and no '.join(missing)} in its config; what is planned are transformers")
    sizes: dict[str, int] = {name: value for name, value in found.items() if value is not None}
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} has an encoder and a decoder; what is planned are decoders alone, as llama or gpt2")
    hidden, heads = sizes["hidden"], sizes["heads"]
    if kind == "nemotron_h":
        return _hybrid(config, sizes)
    if kind in _OTHER_MIXERS:
        raise ValueError(f"{kind} has layers that are not attention ({_OTHER_MIXERS[kind]}); these are not planned")
    middle = get("intermediate_size_mlp", "ffn_hidden_size", "intermediate_size", "ffn_dim", "n_inner", "inner_dim")
    middle = middle or 4 * hidden
    head = get("head_dim") or hidden // heads
    more: dict[str, Any] = {"head": head, "value": head}
    if (rank := get("kv_lora_rank")) is not None:
        more = _latent(config, hidden, heads, rank)
    more |= _windows(config, sizes["layers"])
    return Shape(
        sizes["layers"], hidden, heads, _groups(config, heads), vocabulary=sizes["vocabulary"],
        middle=middle, gated=kind not in _TWO_PRODUCTS, tied=bool(get("tie_word_embeddings")),
        positions=(get("max_position_embeddings") or 0) if kind in _LEARNED_POSITIONS else 0,
        experts=_experts(config, get), name=kind, norms=4 if kind in _FOUR_NORMS else 2,
        head_norms=kind.startswith(_HEAD_NORMS),
        by_hand=get("activation_function", "hidden_act") in ("gelu_new", "gelu_fast"), **more,
    )  # fmt: skip


def _groups(config: "PreTrainedConfig", heads: int) -> int:
    """Key-value heads; one where the configuration says so without a number (Falcon's first, StarCoder's)."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads


#: MLPs without a gate, by Transformers' model_type; everything else of today has one.
_TWO_PRODUCTS = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "gpt_bigcode", "starcoder2",
    "codegen", "xglm", "nemotron", "nemotron_h", "stablelm_alpha", "bert", "roberta", "xlm-roberta", "electra",
    "albert", "distilbert", "deberta", "deberta-v2", "esm", "biogpt", "ctrl",
}  # fmt: skip
#: Models with a norm behind attention and MLP, too; and with norms of queries and keys.
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text", "glm4"}
_HEAD_NORMS = ("qwen3", "gemma3", "olmo2")
_LEARNED_POSITIONS = {"gpt2", "gpt_neo", "opt", "gpt_bigcode", "bert", "roberta", "xlm-roberta", "electra"}
_OTHER_MIXERS = {
    "mamba": "state spaces", "mamba2": "state spaces", "jamba": "state spaces", "bamba": "state spaces",
    "falcon_h1": "state spaces", "zamba": "state spaces", "zamba2": "state spaces",
    "granitemoehybrid": "state spaces", "rwkv": "recurrence", "recurrent_gemma": "recurrence",
    "qwen3_next": "linear attention", "minimax": "linear attention", "lfm2": "convolutions",
}  # fmt: skip


def _latent(config: "PreTrainedConfig", hidden: int, heads: int, rank: int) -> dict:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 2.1): low-rank products before those by heads."""
    rope, plain, value = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    low = getattr(config, "q_lora_rank", None)
    queries = heads * (plain + rope)
    first = (Product(hidden, low), Product(low, queries, COLUMNS)) if low else (Product(hidden, queries, COLUMNS),)
    rest = (
        Product(hidden, rank + rope), Product(rank, heads * (plain + value), COLUMNS),
        Product(heads * value, hidden, ROWS),
    )  # fmt: skip
    return {"head": plain + rope, "value": value, "attention": (*first, *rest)}


def _windows(config: "PreTrainedConfig", layers: int) -> dict[str, Any]:
    """How many layers see a part of the sequence alone, and how many tokens that is.

    ``layer_types`` says it layer by layer, where Transformers fills it in; Mistral's window is every layer's; Qwen's
    is of the layers from ``max_window_layers`` on, and of none unless ``use_sliding_window`` says so.
    """
    sliding, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    window = sliding or chunk
    if not window or getattr(config, "use_sliding_window", None) is False:
        return {}
    if types := getattr(config, "layer_types", None):
        seen = sum(kind in ("sliding_attention", "chunked_attention") for kind in types)
    elif (pattern := getattr(config, "sliding_window_pattern", None)) and pattern > 1:
        seen = layers - layers // pattern
    else:
        seen = layers - (getattr(config, "max_window_layers", None) or 0)
    return {"window": window, "windowed": max(0, min(seen, layers)), "chunked": not sliding}


def _hybrid(config: "PreTrainedConfig", sizes: dict) -> Shape:
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
        **sizes, groups=config.num_key_value_heads, middle=config.intermediate_size, gated=False,
        tied=bool(config.tie_word_embeddings), head=config.head_dim, experts=experts, name=config.model_type,
        pattern=pattern, mamba=mamba,
    )  # fmt: skip


def _experts(config: "PreTrainedConfig", get) -> Experts | None:
    count = get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not count or count < 2:
        return None
    middle = get("moe_intermediate_size", "expert_intermediate_size") or get("intermediate_size", "ffn_hidden_size")
    shared = get("shared_expert_intermediate_size")
    if shared is None:
        shared = (get("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0) * middle
    if config.model_type.startswith("llama4"):  # one for all tokens, which no key of its configuration says
        shared = middle
    chosen = get("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts") or 2
    every = get("decoder_sparse_step", "interleave_moe_layer_step") or 1
    return Experts(
        count, chosen, middle, shared, get("first_k_dense_replace") or 0, every, config.model_type == "gpt_oss"
    )
