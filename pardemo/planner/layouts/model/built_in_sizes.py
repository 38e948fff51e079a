"""Sizes of the models that are built in: tables, so that a plan of them loads no Transformers."""

import re
from collections.abc import Collection
from typing import Any


def _types(layers: int, every: int, others: str = "sliding_attention") -> list[str]:
    """``layer_types``: one in ``every`` layers sees all of the sequence."""
    return [others if place % every else "full_attention" for place in range(1, layers + 1)]


_LLAMA_2 = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_LLAMA_3 = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 8192}
_LLAMA_31 = _LLAMA_3 | {"max_position_embeddings": 131072}
_MISTRAL = {"vocab_size": 32768, "rope_theta": 1e6, "max_position_embeddings": 32768, "sliding_window": None}
_QWEN_25 = {"vocab_size": 152064, "rope_theta": 1e6, "max_position_embeddings": 32768}
_QWEN_3 = {"vocab_size": 151936, "rope_theta": 1e6, "max_position_embeddings": 40960, "head_dim": 128}
_QWEN_3_MOE = _QWEN_3 | {
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip
_MIXTRAL = {
    "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    "max_position_embeddings": 32768,
}  # fmt: skip
_MIXTRAL_22 = {"vocab_size": 32768, "max_position_embeddings": 65536}
_DEEPSEEK_3 = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "norm_topk_prob": True,
}  # fmt: skip
_DEEPSEEK_3_ALONE = {
    "vocab_size": 129280, "n_routed_experts": 256, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "max_position_embeddings": 163840, "routed_scaling_factor": 2.5,
}  # fmt: skip
_KIMI_2 = {
    "vocab_size": 163840, "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 131072, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
}  # fmt: skip
_GPT_OSS = {
    "vocab_size": 201088, "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
_GLM_45 = {
    "vocab_size": 151552, "head_dim": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "rope_theta": 1e6,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": True,
}  # fmt: skip
_LLAMA_4 = {
    "vocab_size": 202048, "head_dim": 128, "num_experts_per_tok": 1, "attention_chunk_size": 8192, "rope_theta": 5e5,
    "intermediate_size_mlp": 16384, "rms_norm_eps": 1e-5, "layer_types": _types(48, 4, "chunked_attention"),
}  # fmt: skip
_GEMMA_3 = {
    "head_dim": 256, "sliding_window": 1024, "vocab_size": 262208, "max_position_embeddings": 131072,
    "rope_theta": 1e6, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_PHI_4 = {"vocab_size": 100352, "max_position_embeddings": 16384, "rope_theta": 250000, "rms_norm_eps": 1e-5}
_TIED = {"tie_word_embeddings": True}  # the head is the embedding
_PHI_4_MINI = _TIED | {
    "vocab_size": 200064, "max_position_embeddings": 131072, "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
}  # fmt: skip
_SMALL_QWEN = {"vocab_size": 151936} | _TIED

#: Architecture, hidden size, layers, heads, key-value heads, width of the MLP, and the rest
#: that counts. Each from the config.json that its makers publish on Hugging Face (meta-llama, mistralai, Qwen, openai,
#: deepseek-ai, moonshotai, zai-org, google, microsoft).
SIZES: dict[str, tuple[str, int, int, int, int, int, dict[str, Any]]] = {
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
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 48, 32, 4, 6144, _QWEN_3_MOE | {"moe_intermediate_size": 768}),
    "qwen3-235b-a22b": ("qwen3_moe", 4096, 94, 64, 4, 12288, _QWEN_3_MOE | {"moe_intermediate_size": 1536}),
    "mixtral-8x7b": ("mixtral", 4096, 32, 32, 8, 14336, _MIXTRAL | {"vocab_size": 32000}),
    "mixtral-8x22b": ("mixtral", 6144, 56, 48, 8, 16384, _MIXTRAL | _MIXTRAL_22),
    "deepseek-v3": ("deepseek_v3", 7168, 61, 128, 128, 18432, _DEEPSEEK_3 | _DEEPSEEK_3_ALONE),
    "kimi-k2": ("deepseek_v3", 7168, 61, 64, 64, 18432, _DEEPSEEK_3 | _KIMI_2),
    "gpt-oss-20b": ("gpt_oss", 2880, 24, 64, 8, 2880, _GPT_OSS | {
        "num_local_experts": 32, "layer_types": _types(24, 2)}),
    "gpt-oss-120b": ("gpt_oss", 2880, 36, 64, 8, 2880, _GPT_OSS | {
        "num_local_experts": 128, "layer_types": _types(36, 2)}),
    "glm-4.5": ("glm4_moe", 5120, 92, 96, 8, 12288, _GLM_45 | {
        "n_routed_experts": 160, "moe_intermediate_size": 1536, "first_k_dense_replace": 3}),
    "glm-4.5-air": ("glm4_moe", 4096, 46, 96, 8, 10944, _GLM_45 | {
        "n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}),
    "llama4-scout": ("llama4_text", 5120, 48, 40, 8, 8192, _LLAMA_4 | {
        "num_local_experts": 16, "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760}),
    "llama4-maverick": ("llama4_text", 5120, 48, 40, 8, 8192, _LLAMA_4 | {
        "num_local_experts": 128, "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576}),
    "gemma3-1b": ("gemma3_text", 1152, 26, 4, 1, 6912, _GEMMA_3 | {
        "vocab_size": 262144, "sliding_window": 512, "max_position_embeddings": 32768, "layer_types": _types(26, 6)}),
    "gemma3-4b": ("gemma3_text", 2560, 34, 8, 4, 10240, _GEMMA_3 | {"layer_types": _types(34, 6)}),
    "gemma3-12b": ("gemma3_text", 3840, 48, 16, 8, 15360, _GEMMA_3 | {"layer_types": _types(48, 6)}),
    "gemma3-27b": ("gemma3_text", 5376, 62, 32, 16, 21504, _GEMMA_3 | {"head_dim": 128, "layer_types": _types(62, 6)}),
    "phi-4": ("phi3", 5120, 40, 40, 10, 17920, _PHI_4),
    "phi-4-mini": ("phi3", 3072, 32, 24, 8, 8192, _PHI_4 | _PHI_4_MINI),
    "mistral-small-24b": ("mistral", 5120, 40, 32, 8, 32768, _MISTRAL | {
        "vocab_size": 131072, "head_dim": 128, "rope_theta": 1e8}),
}  # fmt: skip
#: What their configurations have in common, as Transformers fills it in.
USUAL = {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6}
_BAICHUAN = {
    "vocab_size": 125_696, "max_position_embeddings": 4096, "tie_word_embeddings": False, "normalize_head": True
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "baichuan2-7b": USUAL | _BAICHUAN | {
        "model_type": "baichuan", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11008, "position_embedding": "rope",
    },
    "baichuan2-13b": USUAL | _BAICHUAN | {
        "model_type": "baichuan", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
        "intermediate_size": 13696, "position_embedding": "alibi",
    },
    "gpt2": {
        "model_type": "gpt2", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "vocab_size": 50257, "max_position_embeddings": 1024, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
    },
}  # fmt: skip

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


def key_of(name: str, keys: Collection[str]) -> str | None:
    """The key of that name, its own or the hub's: ``meta-llama/Llama-3.1-8B-Instruct`` is llama3.1-8b. Else None."""
    maker, _, model = name.lower().rpartition("/")
    if not maker:
        return model if model in keys else None
    own = model.removeprefix("meta-")
    if maker not in _MAKERS or not own.startswith(_MAKERS[maker]):
        return None
    if own.startswith("mistral-7b") and not own.endswith("-v0.3"):
        return None
    plain = _SAME_SIZES.sub("", own).replace("-", "")
    return next((key for key in keys if key.replace("-", "") == plain), None)
