"""Describes which part of a model is trained, all of it or LoRA, and in how many bits its weights are kept."""

from dataclasses import dataclass

from pardemo.planner.layouts.configurations import KINDS
from pardemo.planner.layouts.shape import Shape

#: Bytes of a frozen weight. ``nf4``: 4 bits and an fp32 scale for each 64 (QLoRA, arXiv 2305.14314, 3);
#: ``nf4-double``: scales in 8 bits, which have a scale for each 256 of their own; ``int8``: a row's scale is left out;
#: ``int4``: GPTQ's, with an fp16 scale and a 4-bit zero for each 128.
BASES = {
    "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "int8": 1.0, "nf4": 0.5 + 4 / 64, "nf4-double": 0.5 + 1 / 64 + 4 / 64 / 256,
    "int4": 0.5 + 2.5 / 128,
}  # fmt: skip
#: Kinds that bitsandbytes makes of weights in 16 bits as a model is loaded.
CONVERTED = ("int8", "nf4", "nf4-double")
#: Bytes of the optimizer's states of a trained weight that lie on the GPU, beside an fp32 master copy where there is
#: one. 8 bits: a scale for each 256 is left out; paged ones are on the host when memory is short. Adafactor keeps sums
#: of rows and columns alone. ``adamw`` is torch's fused one; ``adamw-foreach`` makes a list of square roots, too (the
#: Trainer's until 2025).
STATES = {
    "adamw": 8.0, "adamw-foreach": 8.0, "adamw-bf16": 4.0, "adamw-8bit": 2.0, "paged-adamw": 0.0,
    "paged-adamw-8bit": 0.0, "adafactor": 0.0, "sgd": 0.0,
}  # fmt: skip
#: The parts of a layer that a module's name stands for, by the last part of the name.
PARTS: dict[str, list[str]] = KINDS["modules"]
EVERYTHING = "all-linear"


@dataclass(frozen=True)
class Tuning:
    """Settings of a fine-tune: LoRA or all parameters, the bits of frozen weights, the optimizer, the loss."""

    rank: int = 0  # of LoRA's matrices; 0 trains all parameters
    target: tuple[str, ...] = ()  # names of the modules that have them, or ``all-linear``
    dropout: float = 0.1  # before them; 0 copies nothing for it
    base: str = "bf16"  # of frozen weights, of :data:`BASES`; embeddings, head and norms stay in 16 bits
    embeddings: bool = False  # whether embedding and head are trained whole, too (PEFT's ``modules_to_save``)
    optimizer: str = "adamw"  # of :data:`STATES`
    adapters_fp32: bool = False  # beside a 16-bit model (PEFT's ``autocast_adapter_dtype``); DeepSpeed casts them
    fused_loss: bool = False  # whether logits are made piece by piece in the loss (Liger's, cut cross entropy)
    labels: float = 1.0  # share of the tokens that logits are made for
    experts_apart: bool = False  # whether each expert is a module of its own, as in Transformers before version 5
    alpha: float = 32  # LoRA's product is scaled by alpha / rank

    def __post_init__(self):
        if self.base not in BASES:
            raise ValueError(f"base must be one of {', '.join(BASES)}, not {self.base!r}")
        if self.optimizer not in STATES:
            raise ValueError(f"optimizer must be one of {', '.join(STATES)}, not {self.optimizer!r}")
        if self.rank < 0:
            raise ValueError(f"a rank is at least 1 (0 trains all parameters), not {self.rank!r}")
        if not self.rank and self.base not in ("bf16", "fp16", "fp32"):
            raise ValueError(f"weights in {self.base} cannot be trained themselves; LoRA beside them can (rank 8, say)")
        if self.rank and not self.target:
            raise ValueError("LoRA needs the modules it goes to, as q_proj,v_proj or all-linear")
        if not 0 < self.labels <= 1:
            raise ValueError(f"labels is a share above 0 and up to 1, not {self.labels!r}")

    @property
    def lora(self) -> bool:
        return self.rank > 0


FULL = Tuning()  # all parameters


def linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """Returns (inputs, outputs) of each linear module of a layer that LoRA can go to, by its part.

    Latent attention has two projections after one another for queries (where they are low-rank), and for keys and
    values. In a model with experts these are attention's alone: PEFT takes an MLP's name there for the experts too,
    which are one parameter in Transformers, and goes to them otherwise.
    """
    h, m = shape.hidden, shape.ffn_hidden
    if len(shape.projections) > 2:
        names = ("q_a", "q_b", "kv_a", "kv_b", "o") if len(shape.projections) == 5 else ("q", "kv_a", "kv_b", "o")
        modules = {name: (matmul.inputs, matmul.outputs) for name, matmul in zip(names, shape.projections, strict=True)}
    else:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        values = shape.kv_heads * shape.value_dim
        modules = {"q": (h, queries), "k": (h, keys), "v": (h, values), "qkv": (h, queries + keys + values)}
        modules["o"] = (shape.heads * shape.value_dim, h)
    if shape.experts is None:
        modules |= {"up": (h, m), "down": (m, h), "gate+up": (h, 2 * m if shape.gated else m)}
        modules |= {"gate": (h, m)} if shape.gated else {}
    return modules


def adapted(tuning: Tuning, shape: Shape) -> list[tuple[int, int]]:
    """Returns (inputs, outputs) of a layer's modules that LoRA goes to, each once.

    Raises:
        ValueError: a target is no module that is known, or the model has none of its name.
    """
    modules = linears(shape)
    return [modules[part] for part in adapted_parts(tuning, shape)]


def adapted_parts(tuning: Tuning, shape: Shape) -> list[str]:
    """Returns the parts, of :data:`PARTS`, of a layer's modules that LoRA goes to."""
    modules, experts = linears(shape), shape.experts
    beside = experts and (experts.shared_ffn_hidden or experts.first_dense_layers or experts.layer_interval > 1)
    inside = "a model with experts: LoRA is planned on its attention alone"
    if tuning.target == (EVERYTHING,):
        if beside:
            raise ValueError(f"{shape.name or 'this'} is {inside}, and {EVERYTHING} are more; name them")
        return [name for name in modules if name not in ("qkv", "gate+up")]
    parts: list[str] = []
    for target in tuning.target:
        last = target.rpartition(".")[2]
        if last == "w2" or (last == "w1" and not shape.gated):  # one of two ways up, in Qwen's first models
            name = "up"
        else:
            name = next((part for part, names in PARTS.items() if last in names), "")
        if not name:
            known = ", ".join(sorted({name for names in PARTS.values() for name in names}))
            raise ValueError(f"LoRA's target {target!r} is no module of a layer that is known: {known}")
        split = name.split("+") if name == "o+down" else [name]
        if missing := [part for part in split if part not in modules]:
            why = f"; it is {inside}" if experts and missing[0] in ("gate", "up", "down", "gate+up") else ""
            raise ValueError(f"{shape.name or 'the model'} has no module {target!r} for LoRA{why}")
        parts += [part for part in split if part not in parts]
    return parts


def adapter_params(tuning: Tuning, shape: Shape) -> int:
    """Parameters of LoRA's matrices in all layers: rank × (inputs + outputs) of each module (arXiv 2106.09685, 4.1)."""
    if not tuning.lora:
        return 0
    return shape.layers * tuning.rank * sum(inputs + outputs for inputs, outputs in adapted(tuning, shape))


def trained_params(tuning: Tuning, shape: Shape) -> int:
    """Parameters that are updated."""
    if not tuning.lora:
        return shape.params
    return adapter_params(tuning, shape) + (shape.embedding_and_head_params if tuning.embeddings else 0)


def weight_bytes(tuning: Tuning, shape: Shape) -> float:
    """Bytes of the model's own weights: what is in few bits, and embeddings, head and norms in 16."""
    nbytes = BASES[tuning.base]
    if nbytes >= 2:
        return nbytes * shape.params
    left = shape.embedding_and_head_params + 2 * shape.hidden * shape.layers + left_in_16_bits(tuning, shape)
    return nbytes * (shape.params - left) + 2 * left


def left_in_16_bits(tuning: Tuning, shape: Shape) -> int:
    """Parameters of experts that bitsandbytes does not convert.

    It converts linear modules, and Transformers has the experts of a layer in one parameter of three axes since its
    version 5. ``int4`` is what GPTQ writes, experts too.
    """
    if tuning.base not in CONVERTED or shape.experts is None or tuning.experts_apart:
        return 0
    routed = sum(count for kind, count in shape.layer_kinds if kind.mlp == "experts")
    return round(routed * shape.expert_params)
