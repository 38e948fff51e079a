"""Sizes of the models that are built in: tables, so that a plan of them loads no Transformers."""

import re
from collections.abc import Collection
from typing import Any

_LLAMA_2 = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_LLAMA_3 = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 8192}
_LLAMA_31 = _LLAMA_3 | {"max_position_embeddings": 131072}
_MISTRAL = {"vocab_size": 32768, "rope_theta": 1e6, "max_position_embeddings": 32768, "sliding_window": None}
_QWEN_25 = {"vocab_size": 152064, "rope_theta": 1e6, "max_position_embeddings": 32768}
_QWEN_3 = {"vocab_size": 151936, "rope_theta": 1e6, "max_position_embeddings": 40960, "head_dim": 128}
_TIED = {"tie_word_embeddings": True}  # the head is the embedding
_SMALL_QWEN = {"vocab_size": 151936} | _TIED

#: Architecture, hidden size, layers, heads, key-value heads, width of the MLP, and the rest
#: that counts. Each from the config.json that its makers publish on Hugging Face (meta-llama, mistralai, Qwen, openai).
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
}
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
    "baichuan-inc": "baichuan2",
    "meta-llama": "llama",
    "mistralai": "mistral",
    "openai-community": "gpt2",
    "qwen": "qwen",
}
#: What a name on the hub may end with and have the same sizes. (Mistral's v0.1 and v0.2 have a smaller vocabulary.)
_SAME_SIZES = re.compile(r"(-hf|-base|-chat|-chat-hf|-instruct|-v0\.3|-instruct-v0\.3)$")


def key_of(name: str, keys: Collection[str]) -> str | None:
    """The key of that name, its own or the hub's: ``meta-llama/Llama-3.1-8B-Instruct`` is llama3.1-8b. Else None."""
    maker, _, model = name.lower().rpartition("/")
    if not maker:
        return model if model in keys else None
    own = model.removeprefix("meta-")
    if maker not in _MAKERS or not own.startswith(_MAKERS[maker]):
        return None
    if maker == "mistralai" and not own.endswith("-v0.3"):
        return None
    plain = _SAME_SIZES.sub("", own).replace("-", "")
    return next((key for key in keys if key.replace("-", "") == plain), None)
