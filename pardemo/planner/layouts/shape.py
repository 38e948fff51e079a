"""A model as its matrix multiplications: what each layer multiplies, keeps and owns, whatever it is written in."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

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

    The first ``dense_layers`` layers have none; of the others one in ``every`` has (Llama 4 Maverick: 2). ``biased``:
    whether their products have biases (GPT-OSS). ``latent``: a smaller width in which tokens travel to them and back,
    made by two products of all tokens (Nemotron 3 Super: 1024 of 4096); 0 for none.
    """

    count: int
    chosen: int
    middle: int
    shared: int = 0
    dense_layers: int = 0
    every: int = 1
    biased: bool = False
    latent: int = 0


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 mixer (Dao and Gu 2024, arXiv 2405.21060): ``heads`` of width ``head``, each with ``state`` numbers for
    each of these; ``groups`` that share what is written and read; ``kernel`` of its convolution, and whether that has a
    ``bias``."""

    heads: int
    head: int
    state: int
    groups: int
    kernel: int = 4
    bias: bool = True

    @property
    def inner(self) -> int:
        return self.heads * self.head

    @property
    def kept(self) -> int:
        """Numbers of a token that its backward pass needs."""
        return 3 * self.inner + 2 * self.groups * self.state

    def products(self, hidden: int) -> tuple[Product, Product]:
        """What it multiplies: the way in (gate, values, what is written and read, time steps) and the way out."""
        into = 2 * self.inner + 2 * self.groups * self.state + self.heads
        return Product(hidden, into, COLUMNS), Product(self.inner, hidden, ROWS)

    @property
    def params(self) -> int:
        """Parameters beside those of its products: the convolution, time steps, decay, skip and norm."""
        convolved = self.inner + 2 * self.groups * self.state
        return (self.kernel + self.bias) * convolved + 3 * self.heads + self.inner

    @property
    def scan_flops(self) -> int:
        """Operations of a token's scan, forward, as Megatron-LM counts them (``mamba_layer_flops``)."""
        return 7 * self.inner * self.state


@dataclass(frozen=True)
class DeltaNet:
    """A gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): a state of ``key`` × ``value`` numbers in each of
    ``heads``, of which ``groups`` have queries and keys; ``kernel`` of its convolution."""

    heads: int
    value: int
    groups: int
    key: int
    kernel: int = 4

    @property
    def inner(self) -> int:
        return self.heads * self.value

    @property
    def kept(self) -> int:
        """Numbers of a token that its backward pass needs: queries, keys, values, the gate, what is read."""
        return 3 * self.inner + 2 * self.groups * self.key

    def products(self, hidden: int) -> tuple[Product, Product]:
        """What it multiplies: the way in (queries, keys, values, gate, decay, strength) and the way out."""
        into = 2 * self.groups * self.key + 2 * self.inner + 2 * self.heads
        return Product(hidden, into, COLUMNS), Product(self.inner, hidden, ROWS)

    @property
    def params(self) -> int:
        """Parameters beside those of its products: the convolution, decay, time steps and norm."""
        return self.kernel * (2 * self.groups * self.key + self.inner) + 2 * self.heads + self.value

    @property
    def scan_flops(self) -> int:
        """Operations of a token, forward (equation 10): decay, what a key reads, what is written, what is read."""
        return 7 * self.inner * self.key


@dataclass(frozen=True)
class ShortConvolution:
    """A gated convolution over the last ``kernel`` tokens, of ``width`` channels (LFM2, arXiv 2511.23404)."""

    width: int
    kernel: int = 3

    @property
    def inner(self) -> int:
        return self.width

    @property
    def kept(self) -> int:
        """Numbers of a token that its backward pass needs: two gates, what they multiply, what is convolved."""
        return 4 * self.width

    def products(self, hidden: int) -> tuple[Product, Product]:
        """What it multiplies: the way in (two gates and the values) and the way out."""
        return Product(hidden, 3 * self.width, COLUMNS), Product(self.width, hidden, ROWS)

    @property
    def params(self) -> int:
        """Parameters beside those of its products: the convolution."""
        return self.kernel * self.width

    @property
    def scan_flops(self) -> int:
        """Operations of a token, forward: the convolution and both gates."""
        return 2 * (self.kernel + 1) * self.width


@dataclass(frozen=True)
class Compressor:
    """What attention sees beside its window, if any, in ``layers`` layers: one entry for each ``rate`` tokens.

    Args:
        products: that make the entries and choose among them. chosen: how many of them a token sees, 0 for all.
        scores: numbers of a token by which all of them are scored, if some are chosen. params: beside its products.
    """

    rate: int
    layers: int
    products: tuple[Product, ...]
    chosen: int = 0
    scores: int = 0
    params: int = 0


@dataclass(frozen=True)
class WholeHeads:
    """Heads of the layers that see the whole sequence, where these have others (Gemma 4): their width, how many of keys
    and values, and whether ``values`` have a product of their own."""

    head: int
    groups: int
    values: bool = True


@dataclass(frozen=True)
class Layer:
    """What a layer is made of.

    Args:
        mixer: ``attention``, ``linear`` (the model's other mixer), or "" for none. mlp: ``dense``, ``experts``, or ""
            for none.
        window: tokens that its attention sees (sliding window, chunked attention), 0 for all.
        compressor: the place of its :class:`Compressor` among the model's, from 1 on; 0 where it has none.
    """

    mixer: str = "attention"
    mlp: str = "dense"
    window: int = 0
    compressor: int = 0


#: Letters of a hybrid model's layers, as Megatron-LM's ``--hybrid-override-pattern`` has them; E is one of experts.
_LETTERS = {"M": Layer("linear", ""), "*": Layer("attention", ""), "-": Layer("", "dense"), "E": Layer("", "experts")}


@dataclass(frozen=True)
class Shape:
    """A transformer's sizes.

    Args:
        layers, hidden, heads, groups (key-value heads), middle (the MLP's width), vocabulary: as everywhere.
        head: a head's width of queries and keys; value: of values.
        gated: whether the MLP has a gate (SwiGLU), three products instead of two.
        tied: whether the head's weights are the embedding's. positions: learned position embeddings.
        attention: products of the projections; filled from the sizes where left out.
        window: tokens that the attention of ``windowed`` layers sees; these are spread evenly. chunked: whether that is
            the part of the sequence that a token lies in (Llama 4), and not the last ones before it.
        linear: of a hybrid model, the mixer of the layers that have no attention: its cost is linear in the sequence.
        whole: heads of the layers without a window, where they are not those of the others.
        pattern: a letter for each layer that has one part alone: M that mixer, * attention, - MLP, E experts; without
            one ``linear_layers`` layers have it before their MLP, and these are spread evenly.
        compressors: of the layers whose attention sees compressed tokens beside its window.
        streams: residual streams, of which each part of a layer mixes one (hyper-connections); 1 as everywhere.
        norms: of a layer. head_norms: whether queries and keys have norms of their own. by_hand: whether the MLP's
            activation is written out (``gelu_new``), so that each of its steps keeps something.
        mtp: further layers that each predict one more token (DeepSeek-V3's multi-token prediction) by the head.
        further: parameters beside products, the ``linear`` mixer's own, and a norm before each part of a layer and
            before the head: biases, other norms.
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
    window: int = 0
    windowed: int = 0
    chunked: bool = False
    pattern: str = ""
    linear: Mamba | DeltaNet | ShortConvolution | None = None
    mtp: int = 0
    norms: int = 2
    head_norms: bool = False
    by_hand: bool = False
    linear_layers: int = 0
    compressors: tuple[Compressor, ...] = ()
    streams: int = 1
    further: int = 0
    whole: WholeHeads | None = None

    def __post_init__(self):
        for field in ("layers", "hidden", "heads", "groups", "middle", "vocabulary"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"{field} must be at least 1, not {value!r}")
        head = self.head or self.hidden // self.heads
        if head < 1:
            raise ValueError(f"a head's width must be at least 1, not {head!r}")
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "value", self.value or head)
        if not self.attention:
            inner = (self.heads + self.groups) * head + self.groups * self.value
            projections = (Product(self.hidden, inner, COLUMNS), Product(self.heads * self.value, self.hidden, ROWS))
            object.__setattr__(self, "attention", projections)

    def mlp(self, middle: int, hidden: int = 0) -> tuple[Product, ...]:
        """The products of an MLP of that width, on the model's or on another ``hidden`` width."""
        up, hidden = middle * (2 if self.gated else 1), hidden or self.hidden
        return Product(hidden, up, COLUMNS), Product(middle, hidden, ROWS)

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, float], ...]:
        """Each kind of layer with how many there are."""
        if self.pattern:
            letters = dict.fromkeys(self.pattern)
            return tuple((_LETTERS[letter], float(self.pattern.count(letter))) for letter in letters)
        of_compressors = [each.layers for each in self.compressors]
        mixers = [
            (("linear", 0, 0), self.linear_layers),
            (("attention", 0, 0), self.layers - self.windowed - self.linear_layers - sum(of_compressors)),
            (("attention", self.window, 0), self.windowed),
            *((("attention", self.window, place), count) for place, count in enumerate(of_compressors, 1)),
        ]  # fmt: skip
        counts = [("dense", self.dense_layers), ("experts", self.layers - self.dense_layers)]
        return tuple(
            (Layer(mixer, mlp, window, compressor), count * of / self.layers)
            for mlp, count in counts for (mixer, window, compressor), of in mixers if count and of
        )  # fmt: skip

    @property
    def hybrid(self) -> bool:
        """Whether some of its layers have no attention, one that sees compressed tokens, or heads of another width."""
        return self.linear is not None or bool(self.compressors) or self.whole is not None

    def with_heads_of(self, layer: Layer) -> "Shape":
        """The same with the heads that a layer of that kind has."""
        return self if self.whole is None or layer.window or layer.mixer != "attention" else self._with_whole_heads

    @cached_property
    def _with_whole_heads(self) -> "Shape":
        own = self.whole
        assert own is not None
        inner = self.heads * own.head
        keys = own.groups * own.head * (1 + own.values)
        attention = (Product(self.hidden, inner + keys, COLUMNS), Product(inner, self.hidden, ROWS))
        return replace(
            self, head=own.head, value=own.head, groups=own.groups, attention=attention, whole=None, further=0
        )

    @property
    def mtp_layer(self) -> Layer:
        """The kind of the layers of multi-token prediction: the last one's."""
        return self.kinds[-1][0]

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        if self.pattern:
            return self.pattern.count("-")
        if self.experts is None:
            return self.layers
        others = self.layers - self.experts.dense_layers
        return self.layers - math.floor(others / self.experts.every)

    @cached_property
    def attention_params(self) -> int:
        """Parameters of a layer's attention."""
        return sum(product.params for product in self.attention)

    @cached_property
    def expert_params(self) -> int:
        """Parameters of all experts of one layer; 0 where there are none."""
        return 0 if self.experts is None else self.experts.count * sum(p.params for p in self.expert)

    @property
    def expert(self) -> tuple[Product, ...]:
        """The products of one expert; () where there are none."""
        of = self.experts
        return () if of is None else self.mlp(of.middle, of.latent)

    def compressor(self, layer: Layer) -> Compressor | None:
        """What compresses tokens for the attention of a layer of that kind."""
        return self.compressors[layer.compressor - 1] if layer.compressor else None

    def layer_params(self, layer: Layer) -> int:
        """Parameters of a layer of that kind outside its experts, the norms before its parts included."""
        params = self.hidden * (bool(layer.mixer) + bool(layer.mlp))
        params += sum(product.params for product in self.products(layer))
        if compressor := self.compressor(layer):
            params += compressor.params
        return params + (self.linear.params if layer.mixer == "linear" and self.linear else 0)

    @property
    def expert_layers(self) -> float:
        """Layers that have experts."""
        return sum(count for kind, count in self.kinds if kind.mlp == "experts")

    @property
    def matrices(self) -> int:
        """Parameters of all products outside of experts, of embeddings and of the head."""
        layers = sum(count * sum(each.params for each in self.products(kind)) for kind, count in self.kinds)
        return round(layers) + self.ends_params

    @cached_property
    def mean_layer(self) -> tuple[float, float]:
        """Parameters of a layer, on average: outside of experts, and in experts."""
        dense = sum(count * self.layer_params(kind) for kind, count in self.kinds)
        return dense / self.layers, self.expert_layers * self.expert_params / self.layers

    def products(self, layer: Layer) -> tuple[Product, ...]:
        """What a layer of that kind multiplies each token with, the experts left out."""
        weights: tuple[Product, ...] = ()
        if layer.mixer == "attention":
            compressor = self.compressor(layer)
            weights += self.with_heads_of(layer).attention + (compressor.products if compressor else ())
        elif layer.mixer == "linear" and self.linear is not None:
            weights += self.linear.products(self.hidden)
        if layer.mlp == "dense":
            weights += self.mlp(self.middle)
        elif layer.mlp == "experts" and self.experts is not None:
            weights += (Product(self.hidden, self.experts.count),)
            weights += self.mlp(self.experts.shared) if self.experts.shared else ()
            if latent := self.experts.latent:
                weights += Product(self.hidden, latent), Product(latent, self.hidden)
        return weights

    @property
    def embedding_params(self) -> int:
        """Parameters of the token and position embeddings."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def ends_params(self) -> int:
        """Parameters of embeddings and head, which may be the same."""
        return self.embedding_params + (0 if self.tied else self.head_params)

    @property
    def mtp_params(self) -> int:
        """Parameters of one layer of multi-token prediction: two norms, a product of twice the width, a layer."""
        layer = self.mtp_layer
        return 2 * self.hidden**2 + 3 * self.hidden + self.layer_params(layer) + (
            self.expert_params if layer.mlp == "experts" else 0)  # fmt: skip

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        layers = sum(
            count * (self.layer_params(kind) + (self.expert_params if kind.mlp == "experts" else 0))
            for kind, count in self.kinds
        )
        ends = self.embedding_params + (0 if self.tied else self.head_params) + self.hidden
        return round(layers) + self.mtp * self.mtp_params + ends + self.further

    def seen(self, layer: Layer, sequence: int, causal: bool = True) -> float:
        """Tokens that a token's attention sees, on average, in a layer of that kind."""
        if compressor := self.compressor(layer):
            near = self.seen(replace(layer, compressor=0), sequence, causal) if layer.window else 0.0
            return near + self._compressed(compressor, sequence, causal)
        if not layer.window or layer.window >= sequence:
            return sequence / 2 if causal else sequence
        if self.chunked:
            return layer.window / 2 if causal else layer.window
        return layer.window - layer.window**2 / (2 * sequence) if causal else layer.window

    def _compressed(self, compressor: Compressor, sequence: int, causal: bool) -> float:
        """Compressed entries that a token sees, on average, and the scoring of all of them as so many more."""
        entries = sequence / compressor.rate
        there = entries / 2 if causal else entries
        if not compressor.chosen or compressor.chosen >= entries:
            return there + there * compressor.scores / (self.heads * (self.head + self.value))
        most = compressor.chosen
        seen = most - most**2 / (2 * entries) if causal else most
        return seen + there * compressor.scores / (self.heads * (self.head + self.value))

    def flops(self, sequence: int, causal: bool = True, frozen: bool = False) -> float:
        """Operations of a token's forward and backward pass, without recomputation: those of matrix multiplications.

        Six for each parameter that multiplies it, and the attention's two products over the sequence. ``causal``
        counts half of these. Source: Chowdhery et al. 2022 (PaLM), appendix B, which counts them whole. A Mamba layer's
        scan is counted as Megatron-LM does. ``frozen`` weights need no gradients: four for each.
        """
        for_each = 4 if frozen else 6
        each = sum(count * self._layer_flops(kind, sequence, causal, for_each) for kind, count in self.kinds)
        further = self._layer_flops(self.mtp_layer, sequence, causal, for_each)
        further += for_each * (2 * self.hidden**2 + self.head_params)
        return each + for_each * self.head_params + (self.mtp * further if self.mtp else 0.0)

    def _layer_flops(self, layer: Layer, sequence: int, causal: bool, for_each: int) -> float:
        total = float(sum(product.params for product in self.products(layer)))
        if layer.mlp == "experts" and self.experts is not None:
            total += self.experts.chosen * sum(product.params for product in self.expert)
        other = 3.0 * self.linear.scan_flops if layer.mixer == "linear" and self.linear else 0.0
        if layer.mixer == "attention":
            shape = self.with_heads_of(layer)
            other += 6 * self.heads * (shape.head + shape.value) * self.seen(layer, sequence, causal)
        return for_each * total + other


def gpt(layers: int, hidden: int, heads: int, vocabulary: int, positions: int, name: str = "") -> Shape:
    """A model as GPT-2: MLPs of four times the width without a gate, learned positions, the embedding as its head."""
    return Shape(
        layers, hidden, heads, heads, 4 * hidden, vocabulary, gated=False, tied=True, positions=positions, name=name
    )


MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def missing(module: str, shape: Shape) -> str:
    """What a model would need for a module to be in it; "" where it is.

    Only norms that are modules of their own can be recomputed: that of experts, and that before latent attention. The
    others are one module with the product that follows (``gpt_layer_specs.py``).
    """
    experts = shape.experts
    needed = {
        "moe": ("experts", experts),
        "moe_act": ("experts", experts),
        "shared_experts": ("shared experts", experts and experts.shared),
        "layernorm": ("experts or latent attention", experts or up_projections(shape)),
        "mla_up_proj": ("latent attention", up_projections(shape)),
        "mlp": ("layers with a dense MLP", any(kind.mlp == "dense" for kind, _ in shape.kinds)),
        "core_attn": ("attention", any(kind.mixer == "attention" for kind, _ in shape.kinds)),
    }
    feature, there = needed[module]
    return "" if there else feature


def up_projections(shape: Shape) -> tuple[Product, ...]:
    """Of latent attention, the products from a low rank to heads; () where attention has none."""
    if any(each.rate > 1 for each in shape.compressors):  # which Megatron-core has no modules for
        return ()
    before = shape.attention[:-1]  # the last one is the output's
    return tuple(each for each in before if each.inputs != shape.hidden)


@dataclass(frozen=True)
class Again:
    """What a layer's modules make again in the backward pass, the experts' own part left out.

    Args:
        weights: what a token is multiplied with once more. blocks: how many of the layer's two run a third time, with
            their way through memory and their tensor-parallel exchange. numbers: of a token that are read or written
            beside that, cut by tensor parallelism.
    """

    weights: tuple[Product, ...] = ()
    blocks: int = 0
    numbers: float = 0.0


def again(shape: Shape, modules: tuple[str, ...], kind: Layer) -> Again:
    """What a layer of that kind makes again of ``modules``."""
    weights: list[Product] = []
    numbers, of = 0.0, shape.experts
    blocks = int((kind.mlp == "dense" and "mlp" in modules) or (kind.mlp == "experts" and "moe" in modules))
    if kind.mixer == "attention" and "mla_up_proj" in modules:
        weights += up_projections(shape)
        numbers += 2 * sum(each.outputs for each in up_projections(shape))  # positions: read and written
    if kind.mlp == "dense" and "mlp" in modules:
        weights += shape.mlp(shape.middle)
    if kind.mlp == "experts" and of is not None:
        if "moe" in modules:
            weights.append(Product(shape.hidden, of.count))
        if of.shared and {"moe", "shared_experts"} & set(modules):
            weights += shape.mlp(of.shared)
        if "moe_act" in modules and "moe" not in modules:
            numbers += of.chosen * of.middle * (3 if shape.gated else 2)
    if "layernorm" in modules:
        numbers += 2 * shape.hidden * norms(shape, kind)
    return Again(tuple(weights), blocks, numbers)


def norms(shape: Shape, kind: Layer) -> int:
    """A layer's norms that are modules of their own."""
    return int(kind.mixer == "attention" and bool(up_projections(shape))) + int(kind.mlp == "experts")
