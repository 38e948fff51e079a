"""The shape of a model from its Hugging Face configuration."""

from typing import TYPE_CHECKING, Any

from pardemo.planner.layouts.model.shape import COLUMNS, ROWS, Experts, Mamba, Product, Shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
