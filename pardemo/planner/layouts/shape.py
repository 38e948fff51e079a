"""A model as its matrix multiplications: what each layer multiplies, keeps and owns, whatever it is written in."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

COLUMNS, ROWS, WHOLE = "columns", "rows", "whole"


@dataclass(frozen=True)
class Product:
    """``inputs`` × ``outputs`` weights, which tensor parallelism cuts by columns, by rows, or not at all."""

    inputs: int
    outputs: int
    cut: str = WHOLE

    @property
    def params(self) -> int:
        return self.inputs * self.outputs

    def on(self, tp: int) -> tuple[float, float]:
        """Inputs and outputs of the part on one of ``tp`` ranks."""
        return (
            self.inputs / tp if self.cut == ROWS else self.inputs,
            self.outputs / tp if self.cut == COLUMNS else self.outputs,
        )


@dataclass(frozen=True)
class Experts:
    """Of a layer with experts: ``count`` of width ``middle``, ``chosen`` for each token, ``shared`` width for all.

    The first ``dense_layers`` layers have none.
    """

    count: int
    chosen: int
    middle: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class Shape:
    """A transformer's sizes.

    Args:
        layers, hidden, heads, groups (key-value heads), middle (the MLP's width), vocabulary: as everywhere.
        head: a head's width of queries and keys; value: of values.
        gated: whether the MLP has a gate (SwiGLU), three products instead of two.
        tied: whether the head's weights are the embedding's. positions: learned position embeddings.
        attention: products of the projections; filled from the sizes where left out.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    middle: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    head: int = 0
    value: int = 0
    positions: int = 0
    experts: Experts | None = None
    attention: tuple[Product, ...] = ()
    name: str = ""

    def __post_init__(self):
        for field in ("layers", "hidden", "heads", "groups", "middle", "vocabulary"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"{field} must be at least 1, not {value!r}")
        head = self.head or self.hidden // self.heads
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "value", self.value or head)
        if not self.attention:
            inner = (self.heads + self.groups) * head + self.groups * self.value
            projections = (Product(self.hidden, inner, COLUMNS), Product(self.heads * self.value, self.hidden, ROWS))
            object.__setattr__(self, "attention", projections)

    def mlp(self, middle: int) -> tuple[Product, ...]:
        """The products of an MLP of that width."""
        up = middle * (2 if self.gated else 1)
        return Product(self.hidden, up, COLUMNS), Product(middle, self.hidden, ROWS)

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        return self.layers if self.experts is None else self.experts.dense_layers

    @property
    def attention_params(self) -> int:
        """Parameters of a layer's attention."""
        return sum(product.params for product in self.attention)

    @property
    def dense_params(self) -> int:
        """Parameters of a layer with an ordinary MLP, its two norms included."""
        return self.attention_params + sum(product.params for product in self.mlp(self.middle)) + 2 * self.hidden

    @property
    def expert_params(self) -> int:
        """Parameters of all experts of one layer; 0 where there are none."""
        return 0 if self.experts is None else self.experts.count * sum(p.params for p in self.mlp(self.experts.middle))

    @property
    def moe_params(self) -> int:
        """Parameters of a layer with experts outside its experts: attention, norms, router, shared expert."""
        if self.experts is None:
            return 0
        shared = sum(p.params for p in self.mlp(self.experts.shared)) if self.experts.shared else 0
        return self.attention_params + shared + self.hidden * self.experts.count + 2 * self.hidden

    @property
    def embedding_params(self) -> int:
        """Parameters of the token and position embeddings."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        layers = self.dense_layers * self.dense_params
        layers += (self.layers - self.dense_layers) * (self.moe_params + self.expert_params)
        return layers + self.embedding_params + (0 if self.tied else self.head_params) + self.hidden

    def flops(self, sequence: int, causal: bool = True) -> float:
        """Operations of a token's forward and backward pass, without recomputation: those of matrix multiplications.

        Six for each parameter that multiplies it, and the attention's two products over the sequence. ``causal``
        counts half of these. Source: Chowdhery et al. 2022 (PaLM), appendix B, which counts them whole.
        """
        each = sum(product.params for product in self.attention)
        dense = each + sum(product.params for product in self.mlp(self.middle))
        total = self.dense_layers * dense
        if self.experts is not None:
            chosen = self.experts.chosen * sum(product.params for product in self.mlp(self.experts.middle))
            shared = sum(product.params for product in self.mlp(self.experts.shared)) if self.experts.shared else 0
            total += (self.layers - self.dense_layers) * (each + chosen + shared + self.hidden * self.experts.count)
        scores = self.layers * self.heads * (self.head + self.value) * sequence / (2 if causal else 1)
        return 6 * (total + self.head_params + scores)


def of(config: "PreTrainedConfig") -> Shape:
    """The shape of a Hugging Face configuration, dense or with experts.

    Raises:
        ValueError: the sizes are not those of a transformer that is known; what is missing is named.
    """
    get = lambda *names: next((v for n in names if (v := getattr(config, n, None)) is not None), None)  # noqa: E731
    kind = config.model_type
    sizes = {
        "layers": get("num_hidden_layers"), "hidden": get("hidden_size"), "heads": get("num_attention_heads"),
        "vocabulary": get("vocab_size"),
    }  # fmt: skip
    if missing := [name for name, value in sizes.items() if value is None]:
        raise ValueError(f"{kind}: no {' and no '.join(missing)} in its config; what is planned are transformers")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} has an encoder and a decoder; what is planned are decoders alone, as llama or gpt2")
    hidden, heads = sizes["hidden"], sizes["heads"]
    if kind in _OTHER_MIXERS:
        raise ValueError(f"{kind} has layers that are not attention ({_OTHER_MIXERS[kind]}); these are not planned")
    middle = get("ffn_hidden_size", "intermediate_size", "ffn_dim", "n_inner", "inner_dim") or 4 * hidden
    head = get("head_dim") or hidden // heads
    more = {"head": head, "value": head}
    if (rank := get("kv_lora_rank")) is not None:
        more = _latent(config, hidden, heads, rank)
    return Shape(
        **sizes, groups=_groups(config, heads),
        middle=middle, gated=kind not in _TWO_PRODUCTS, tied=bool(get("tie_word_embeddings")),
        positions=(get("max_position_embeddings") or 0) if kind in _LEARNED_POSITIONS else 0,
        experts=_experts(config, get), name=kind, **more,
    )  # fmt: skip


def _groups(config: "PreTrainedConfig", heads: int) -> int:
    """Key-value heads; one where the configuration says so without a number (Falcon's first, StarCoder's)."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads


#: MLPs without a gate, by Transformers' model_type; everything else of today has one.
_TWO_PRODUCTS = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "gpt_bigcode", "starcoder2",
    "codegen", "xglm", "nemotron", "stablelm_alpha",
}  # fmt: skip
_LEARNED_POSITIONS = {"gpt2", "gpt_neo", "opt", "gpt_bigcode"}
_OTHER_MIXERS = {
    "mamba": "state spaces", "mamba2": "state spaces", "jamba": "state spaces", "bamba": "state spaces",
    "falcon_h1": "state spaces", "zamba": "state spaces", "zamba2": "state spaces", "nemotron_h": "state spaces",
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


def _experts(config: "PreTrainedConfig", get) -> Experts | None:
    count = get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not count or count < 2:
        return None
    middle = get("moe_intermediate_size", "expert_intermediate_size") or get("intermediate_size", "ffn_hidden_size")
    shared = get("shared_expert_intermediate_size")
    if shared is None:
        shared = (get("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0) * middle
    chosen = get("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts") or 2
    dense = get("first_k_dense_replace") or 0
    if (step := get("decoder_sparse_step", "interleave_moe_layer_step") or 1) > 1:
        raise ValueError(f"{config.model_type}: experts in one layer of {step} only; that is not planned")
    return Experts(count, chosen, middle, shared, dense)
