"""Describes a model by its sizes, and lists the matrix multiplications and parameters of each of its layers."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from pardemo import argument_checks

COLUMNS, ROWS, REPLICATED = "columns", "rows", "replicated"


@dataclass(frozen=True)
class Matmul:
    """A weight matrix of ``inputs`` × ``outputs``, which tensor parallelism cuts by columns, by rows, or not at all."""

    inputs: int
    outputs: int
    cut: str = REPLICATED

    @property
    def params(self) -> int:
        return self.inputs * self.outputs

    def on_rank(self, tp: int) -> tuple[float, float]:
        """Returns the inputs and outputs of the part on one of ``tp`` ranks."""
        return (
            self.inputs / tp if self.cut == ROWS else self.inputs,
            self.outputs / tp if self.cut == COLUMNS else self.outputs,
        )


@dataclass(frozen=True)
class Experts:
    """The experts of a layer (mixture of experts), and which layers have them."""

    count: int
    top_k: int  # experts of a token
    ffn_hidden: int  # an expert's width
    shared_ffn_hidden: int = 0  # width of the shared experts together, through which all tokens go
    first_dense_layers: int = 0  # the first layers, which have an ordinary MLP
    layer_interval: int = 1  # of the others one in so many has experts (Llama 4 Maverick: 2)
    bias: bool = False  # whether experts have biases (GPT-OSS)
    latent_dim: int = 0  # tokens are projected to this width to be sent, and back (Nemotron 3 Super: 1024 of 4096)


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 mixer (Dao and Gu 2024, arXiv 2405.21060)."""

    heads: int
    head_dim: int
    state_dim: int  # numbers of state for each channel of a head
    groups: int  # of heads that share B and C
    kernel: int = 4  # tokens of its convolution
    bias: bool = True  # whether the convolution has one

    @property
    def inner_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kept_elements(self) -> int:
        """Numbers of a token that are kept for the backward pass."""
        return 3 * self.inner_dim + 2 * self.groups * self.state_dim

    def matmuls(self, hidden: int) -> tuple[Matmul, Matmul]:
        """Returns its input projection (gate, x, B, C, dt) and its output projection."""
        into = 2 * self.inner_dim + 2 * self.groups * self.state_dim + self.heads
        return Matmul(hidden, into, COLUMNS), Matmul(self.inner_dim, hidden, ROWS)

    @property
    def params(self) -> int:
        """Parameters beside those of its projections: the convolution, dt_bias, A, D and the norm."""
        convolved = self.inner_dim + 2 * self.groups * self.state_dim
        return (self.kernel + self.bias) * convolved + 3 * self.heads + self.inner_dim

    @property
    def scan_flops(self) -> int:
        """Operations of a token's scan, forward, as Megatron-LM counts them (``mamba_layer_flops``)."""
        return 7 * self.inner_dim * self.state_dim


@dataclass(frozen=True)
class DeltaNet:
    """A gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): each head has a state of ``key_dim`` × ``value_dim``."""

    heads: int  # of values
    value_dim: int
    key_heads: int  # of queries and of keys
    key_dim: int
    kernel: int = 4  # tokens of its convolution

    @property
    def inner_dim(self) -> int:
        return self.heads * self.value_dim

    @property
    def kept_elements(self) -> int:
        """Numbers of a token that are kept for the backward pass: queries, keys, values, gate, the state's output."""
        return 3 * self.inner_dim + 2 * self.key_heads * self.key_dim

    def matmuls(self, hidden: int) -> tuple[Matmul, Matmul]:
        """Returns its input projection (queries, keys, values, gate, alpha, beta) and its output projection."""
        into = 2 * self.key_heads * self.key_dim + 2 * self.inner_dim + 2 * self.heads
        return Matmul(hidden, into, COLUMNS), Matmul(self.inner_dim, hidden, ROWS)

    @property
    def params(self) -> int:
        """Parameters beside those of its projections: the convolution, A, dt_bias and the norm."""
        return self.kernel * (2 * self.key_heads * self.key_dim + self.inner_dim) + 2 * self.heads + self.value_dim

    @property
    def scan_flops(self) -> int:
        """Operations of a token, forward (equation 10): decay, the key's read, the update, the query's read."""
        return 7 * self.inner_dim * self.key_dim


@dataclass(frozen=True)
class ShortConvolution:
    """A gated convolution over the last ``kernel`` tokens (LFM2, arXiv 2511.23404)."""

    channels: int
    kernel: int = 3

    @property
    def inner_dim(self) -> int:
        return self.channels

    @property
    def kept_elements(self) -> int:
        """Numbers of a token that are kept for the backward pass: two gates, the values, the convolution's output."""
        return 4 * self.channels

    def matmuls(self, hidden: int) -> tuple[Matmul, Matmul]:
        """Returns its input projection (two gates and the values) and its output projection."""
        return Matmul(hidden, 3 * self.channels, COLUMNS), Matmul(self.channels, hidden, ROWS)

    @property
    def params(self) -> int:
        """Parameters beside those of its projections: the convolution."""
        return self.kernel * self.channels

    @property
    def scan_flops(self) -> int:
        """Operations of a token, forward: the convolution and both gates."""
        return 2 * (self.kernel + 1) * self.channels


@dataclass(frozen=True)
class Compressor:
    """Compressed attention: a token attends to one entry for each ``rate`` tokens, and to its window if it has one."""

    rate: int  # tokens of an entry; 1 selects among tokens as they are
    layers: int  # how many layers have it
    matmuls: tuple[Matmul, ...]  # that make the entries and score them
    top_k: int = 0  # entries that a token attends to; 0: all
    index_dim: int = 0  # numbers of a token by which entries are scored, all heads together
    params: int = 0  # beside those of ``matmuls``


@dataclass(frozen=True)
class GlobalHeads:
    """The heads of layers with global attention, where layers with a window have others (Gemma 4)."""

    head_dim: int
    kv_heads: int
    separate_values: bool = True  # whether values have a projection of their own, or are the keys


@dataclass(frozen=True)
class Layer:
    """A kind of layer: its mixer and its MLP."""

    mixer: str = "attention"  # or "linear", the model's ``linear_mixer``; "" for none
    mlp: str = "dense"  # or "experts"; "" for none
    window: int = 0  # tokens that its attention sees (sliding window, chunked attention); 0: all
    compressor: int = 0  # position of its :class:`Compressor` among the model's, from 1 on; 0: it has none


#: Letters of a hybrid model's layers, as Megatron-LM's ``--hybrid-override-pattern`` has them; E is one of experts.
_LETTERS = {"M": Layer("linear", ""), "*": Layer("attention", ""), "-": Layer("", "dense"), "E": Layer("", "experts")}


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes. Layers of one kind are spread evenly among the others, but where ``pattern`` places them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int  # the MLP's width
    vocabulary: int
    gated: bool = True  # whether the MLP has a gate (SwiGLU), three matrices instead of two
    tied: bool = False  # whether the head's weights are the embedding's
    head_dim: int = 0  # of queries and keys; 0: hidden / heads
    value_dim: int = 0  # of values; 0: head_dim
    positions: int = 0  # learned position embeddings
    experts: Experts | None = None
    projections: tuple[Matmul, ...] = ()  # of attention; made of the sizes where left out
    name: str = ""
    window: int = 0  # tokens that the attention of ``windowed_layers`` sees
    windowed_layers: int = 0
    chunked: bool = False  # whether the window is the chunk that a token lies in (Llama 4), not the tokens before it
    pattern: str = ""  # a letter for each layer of one part: M linear_mixer, * attention, - MLP, E experts
    linear_mixer: Mamba | DeltaNet | ShortConvolution | None = None  # of layers without attention (hybrid models)
    mtp_layers: int = 0  # of multi-token prediction (DeepSeek-V3); each uses the head once more
    norms_per_layer: int = 2
    qk_norm: bool = False  # whether queries and keys have norms
    unfused_activation: bool = False  # whether the MLP's activation is several operations (gelu_new) that save tensors
    linear_layers: int = 0  # layers with ``linear_mixer`` before their MLP, where there is no ``pattern``
    compressors: tuple[Compressor, ...] = ()
    residual_streams: int = 1  # of hyper-connections, which each part of a layer mixes
    other_params: int = 0  # biases, and norms beside the one before each part of a layer and the one before the head
    global_heads: GlobalHeads | None = None  # of the layers without a window, where they differ

    def __post_init__(self):
        for field in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocabulary"):
            argument_checks.whole_number(getattr(self, field), field)
        head_dim = argument_checks.whole_number(self.head_dim or self.hidden // self.heads, "a head's width")
        object.__setattr__(self, "head_dim", head_dim)
        object.__setattr__(self, "value_dim", self.value_dim or head_dim)
        if not self.projections:
            qkv_dim = (self.heads + self.kv_heads) * head_dim + self.kv_heads * self.value_dim
            qkv, output = (self.hidden, qkv_dim), (self.heads * self.value_dim, self.hidden)
            object.__setattr__(self, "projections", (Matmul(*qkv, COLUMNS), Matmul(*output, ROWS)))

    def mlp_matmuls(self, ffn_hidden: int, hidden: int = 0) -> tuple[Matmul, ...]:
        """Returns the matrices of an MLP of that width, on the model's or on another ``hidden`` width."""
        up, hidden = ffn_hidden * (2 if self.gated else 1), hidden or self.hidden
        return Matmul(hidden, up, COLUMNS), Matmul(ffn_hidden, hidden, ROWS)

    @cached_property
    def layer_kinds(self) -> tuple[tuple[Layer, float], ...]:
        """The model's kinds of layers, each with how many layers are of it."""
        if self.pattern:
            letters = dict.fromkeys(self.pattern)
            return tuple((_LETTERS[letter], float(self.pattern.count(letter))) for letter in letters)
        compressed = [compressor.layers for compressor in self.compressors]
        mixers = [
            (("linear", 0, 0), self.linear_layers),
            (("attention", 0, 0), self.layers - self.windowed_layers - self.linear_layers - sum(compressed)),
            (("attention", self.window, 0), self.windowed_layers),
            *((("attention", self.window, index), layers) for index, layers in enumerate(compressed, 1)),
        ]  # fmt: skip
        mlps = [("dense", self.dense_layers), ("experts", self.layers - self.dense_layers)]
        return tuple(
            (Layer(mixer, mlp, window, compressor), with_mlp * with_mixer / self.layers)
            for mlp, with_mlp in mlps for (mixer, window, compressor), with_mixer in mixers if with_mlp and with_mixer
        )  # fmt: skip

    @property
    def hybrid(self) -> bool:
        """Whether some layers have no attention, compressed attention, or heads of another width."""
        return self.linear_mixer is not None or bool(self.compressors) or self.global_heads is not None

    def with_heads_of(self, layer: Layer) -> "Shape":
        """Returns this shape with the attention heads of a layer of that kind."""
        return (
            self if self.global_heads is None or layer.window or layer.mixer != "attention" else self._with_global_heads
        )

    @cached_property
    def _with_global_heads(self) -> "Shape":
        heads = self.global_heads
        assert heads is not None
        queries = self.heads * heads.head_dim
        keys_values = heads.kv_heads * heads.head_dim * (1 + heads.separate_values)
        return replace(
            self, head_dim=heads.head_dim, value_dim=heads.head_dim, kv_heads=heads.kv_heads, global_heads=None,
            projections=(Matmul(self.hidden, queries + keys_values, COLUMNS), Matmul(queries, self.hidden, ROWS)),
            other_params=0,
        )  # fmt: skip

    @property
    def mtp_layer_kind(self) -> Layer:
        """The kind of the layers of multi-token prediction: the last one's."""
        return self.layer_kinds[-1][0]

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        if self.pattern:
            return self.pattern.count("-")
        if self.experts is None:
            return self.layers
        others = self.layers - self.experts.first_dense_layers
        return self.layers - math.floor(others / self.experts.layer_interval)

    @cached_property
    def attention_params(self) -> int:
        """Parameters of a layer's attention."""
        return sum(matmul.params for matmul in self.projections)

    @cached_property
    def expert_params(self) -> int:
        """Parameters of all experts of one layer; 0 where there are none."""
        return 0 if self.experts is None else self.experts.count * sum(p.params for p in self.expert_matmuls)

    @property
    def expert_matmuls(self) -> tuple[Matmul, ...]:
        """The matrices of one expert; () where there are none."""
        experts = self.experts
        return () if experts is None else self.mlp_matmuls(experts.ffn_hidden, experts.latent_dim)

    def compressor(self, layer: Layer) -> Compressor | None:
        """Returns the compressor of a layer of that kind."""
        return self.compressors[layer.compressor - 1] if layer.compressor else None

    def layer_params(self, layer: Layer) -> int:
        """Returns the parameters of a layer of that kind outside its experts, with the norms before its parts."""
        params = self.hidden * (bool(layer.mixer) + bool(layer.mlp))
        params += sum(matmul.params for matmul in self.matmuls(layer))
        if compressor := self.compressor(layer):
            params += compressor.params
        return params + (self.linear_mixer.params if layer.mixer == "linear" and self.linear_mixer else 0)

    @property
    def expert_layers(self) -> float:
        """Layers that have experts."""
        return sum(count for kind, count in self.layer_kinds if kind.mlp == "experts")

    @property
    def matrix_params(self) -> int:
        """Parameters of all matrices outside of experts, of embeddings and of the head."""
        layers = sum(count * sum(matmul.params for matmul in self.matmuls(kind)) for kind, count in self.layer_kinds)
        return round(layers) + self.embedding_and_head_params

    @cached_property
    def mean_layer(self) -> tuple[float, float]:
        """Parameters of a layer, on average: outside of experts, and in experts."""
        dense = sum(count * self.layer_params(kind) for kind, count in self.layer_kinds)
        return dense / self.layers, self.expert_layers * self.expert_params / self.layers

    def matmuls(self, layer: Layer) -> tuple[Matmul, ...]:
        """Returns the matrices that a layer of that kind multiplies each token with, without the experts."""
        weights: tuple[Matmul, ...] = ()
        if layer.mixer == "attention":
            compressor = self.compressor(layer)
            weights += self.with_heads_of(layer).projections + (compressor.matmuls if compressor else ())
        elif layer.mixer == "linear" and self.linear_mixer is not None:
            weights += self.linear_mixer.matmuls(self.hidden)
        if layer.mlp == "dense":
            weights += self.mlp_matmuls(self.ffn_hidden)
        elif layer.mlp == "experts" and self.experts is not None:
            weights += (Matmul(self.hidden, self.experts.count),)
            weights += self.mlp_matmuls(self.experts.shared_ffn_hidden) if self.experts.shared_ffn_hidden else ()
            if latent := self.experts.latent_dim:
                weights += Matmul(self.hidden, latent), Matmul(latent, self.hidden)
        return weights

    @property
    def embedding_params(self) -> int:
        """Parameters of the token and position embeddings."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def embedding_and_head_params(self) -> int:
        """Parameters of embeddings and head, which may be the same."""
        return self.embedding_params + (0 if self.tied else self.head_params)

    @property
    def mtp_params(self) -> int:
        """Parameters of one layer of multi-token prediction: two norms, a projection of twice the width, a layer."""
        layer = self.mtp_layer_kind
        return 2 * self.hidden**2 + 3 * self.hidden + self.layer_params(layer) + (
            self.expert_params if layer.mlp == "experts" else 0)  # fmt: skip

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        layers = sum(
            count * (self.layer_params(kind) + (self.expert_params if kind.mlp == "experts" else 0))
            for kind, count in self.layer_kinds
        )
        ends = self.embedding_and_head_params + self.hidden
        return round(layers) + self.mtp_layers * self.mtp_params + ends + self.other_params

    def attended_tokens(self, layer: Layer, sequence: int, causal: bool = True) -> float:
        """Returns how many tokens a token attends to, on average, in a layer of that kind."""
        if compressor := self.compressor(layer):
            near = self.attended_tokens(replace(layer, compressor=0), sequence, causal) if layer.window else 0.0
            return near + self._compressed(compressor, sequence, causal)
        if not layer.window or layer.window >= sequence:
            return sequence / 2 if causal else sequence
        if self.chunked:
            return layer.window / 2 if causal else layer.window
        return layer.window - layer.window**2 / (2 * sequence) if causal else layer.window

    def _compressed(self, compressor: Compressor, sequence: int, causal: bool) -> float:
        """Returns how many compressed entries a token attends to, on average; scoring them counts as so many more."""
        entries, top_k = sequence / compressor.rate, compressor.top_k
        scored = entries / 2 if causal else entries
        if not top_k or top_k >= entries:
            return scored + scored * compressor.index_dim / (self.heads * (self.head_dim + self.value_dim))
        attended = top_k - top_k**2 / (2 * entries) if causal else top_k
        return attended + scored * compressor.index_dim / (self.heads * (self.head_dim + self.value_dim))

    def flops(self, sequence: int, causal: bool = True, frozen: bool = False) -> float:
        """Counts the operations of a token's forward and backward pass, without recomputation: matrix products alone.

        Six for each parameter that multiplies it, and the attention's two products over the sequence. ``causal``
        counts half of these. Source: Chowdhery et al. 2022 (PaLM), appendix B, which counts them whole. A Mamba layer's
        scan is counted as Megatron-LM does. ``frozen`` weights need no gradients: four for each.
        """
        per_param = 4 if frozen else 6
        layers = sum(count * self._layer_flops(kind, sequence, causal, per_param) for kind, count in self.layer_kinds)
        mtp = self._layer_flops(self.mtp_layer_kind, sequence, causal, per_param)
        mtp += per_param * (2 * self.hidden**2 + self.head_params)
        return layers + per_param * self.head_params + (self.mtp_layers * mtp if self.mtp_layers else 0.0)

    def _layer_flops(self, layer: Layer, sequence: int, causal: bool, per_param: int) -> float:
        total = float(sum(matmul.params for matmul in self.matmuls(layer)))
        if layer.mlp == "experts" and self.experts is not None:
            total += self.experts.top_k * sum(matmul.params for matmul in self.expert_matmuls)
        other = 3.0 * self.linear_mixer.scan_flops if layer.mixer == "linear" and self.linear_mixer else 0.0
        if layer.mixer == "attention":
            shape = self.with_heads_of(layer)
            other += 6 * self.heads * (shape.head_dim + shape.value_dim) * self.attended_tokens(layer, sequence, causal)
        return per_param * total + other


def gpt(layers: int, hidden: int, heads: int, vocabulary: int, positions: int, name: str = "") -> Shape:
    """Returns a model as GPT-2: MLPs of four times the width without a gate, learned positions, tied embeddings."""
    return Shape(
        layers, hidden, heads, heads, 4 * hidden, vocabulary, gated=False, tied=True, positions=positions, name=name
    )
