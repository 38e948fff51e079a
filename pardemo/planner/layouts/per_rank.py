"""Counts a rank's parameters: of its stage, its part of each layer, and the experts that lie on it."""

from dataclasses import dataclass

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.recomputed import up_projections
from pardemo.planner.layouts.shape import Layer, Shape
from pardemo.planner.layouts.tuning import Tuning, adapted, adapted_parts


@dataclass(frozen=True)
class Owned:
    """Parameters of a rank: those that all data- and context-parallel ranks have, and those of its experts.

    Experts that are divided over ``ep`` of a stage's ranks are on each of the others, an ``ep``-th of them.
    """

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def sharded(self, layout: Layout, ranks: int | None = None) -> float:
        """Parameters that a rank keeps when states are sharded over ``ranks`` (by default the layout's ``shards``)."""
        ranks = layout.shards if ranks is None else ranks
        return self.dense / ranks + self.experts / (layout.expert_copies(ranks) if ranks > 1 else 1)


def owned_params(job: Job, layout: Layout, split: list[int], stage: int) -> Owned:
    """Returns the parameters of a rank of a stage: its layers, the first stage's embedding, the last one's head."""
    shape = job.shape
    layer = owned_layer(shape, layout)
    dense, experts = split[stage] * layer.dense, split[stage] * layer.experts
    if stage == 0:
        dense += shape.embedding_params / layout.tp
    if stage == layout.pp - 1 and not (stage == 0 and shape.tied):
        dense += shape.head_params / layout.tp
    if stage == layout.pp - 1 and shape.mtp_layers:
        mtp_expert_params = shape.expert_params if shape.mtp_layer_kind.mlp == "experts" else 0
        dense += shape.mtp_layers * (shape.mtp_params - mtp_expert_params) / layout.tp
        experts += shape.mtp_layers * mtp_expert_params / layout.expert_ranks
    return Owned(dense, experts)


def owned_layer(shape: Shape, layout: Layout) -> Owned:
    """Returns the parameters of a rank's share of an average layer; nothing is sharded over data-parallel ranks."""
    dense, experts = shape.mean_layer
    return Owned(dense / layout.tp, experts / layout.expert_ranks)


#: The modules of a layer that take the same input.
MIXER = {"q", "k", "v", "qkv", "q_a", "kv_a"}
UP = {"up", "gate", "gate+up"}
DOWN = {"down"}
#: Those that tensor parallelism cuts by rows: their input is cut, and of their output's sum each rank has its part.
CUT_BY_ROWS = {"o", "down"}


def owned_trained_params(job: Job, layout: Layout, split: list[int], stage: int) -> Owned:
    """Returns the parameters of a rank of a stage that are updated: all of them, or its layers' adapters."""
    if not job.tuning.lora:
        return owned_params(job, layout, split, stage)
    return Owned(split[stage] * trained_layer(job, layout).dense, 0.0)


def trained_layer(job: Job, layout: Layout) -> Owned:
    """Returns the parameters of a layer's adapters on a rank."""
    params = job.tuning.rank * sum(inputs + outputs for inputs, outputs in adapted(job.tuning, job.shape))
    return Owned(params / layout.tp, 0.0)


def adapters_moved_bytes(job: Job, layout: Layout) -> float:
    """Returns the bytes of a token that a layer's adapters read and write on a rank in one pass.

    They are operations of their own: each reads its module's input and writes an output; the sum of it and the
    module's output reads both and is written.
    """
    tuning, shape = job.tuning, job.shape
    total = 0.0
    for part, (inputs, outputs) in zip(adapted_parts(tuning, shape), adapted(tuning, shape), strict=True):
        read = inputs / layout.tp if part in CUT_BY_ROWS else inputs
        total += 2 * read + 8 * outputs / layout.tp
    return total


def keeps_input(tuning: Tuning, shape: Shape, modules: set[str]) -> bool:
    """Tells whether the input that ``modules`` share is kept for gradients: of their weights, or of an adapter's."""
    return not tuning.lora or bool(modules & set(adapted_parts(tuning, shape)))


def adapters_kept_bytes(tuning: Tuning, shape: Shape) -> float:
    """Returns the bytes of a token that a layer's adapters keep beside inputs: dropped copies, masks, the low rank."""
    if not tuning.lora:
        return 0.0
    dropout_bytes = 3 if tuning.dropout else 0
    return sum(dropout_bytes * inputs + 2 * tuning.rank for inputs, _ in adapted(tuning, shape))


#: Bytes of a number that is kept for the backward pass as a matrix multiplication's input, with its scales; of bf16 2.
LOW_PRECISION_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


def kept_bytes(job: Job, layout: Layout) -> float:
    """Returns the bytes that a layer keeps of each token for its backward pass, on one rank; the mean of all kinds."""
    if layout.recompute == "full":
        return 2 * job.shape.hidden * job.shape.residual_streams / (layout.tp if layout.sequence_parallel else 1)
    key = "kept", layout.tp, layout.cp, layout.sequence_parallel, layout.recompute, layout.recomputed_modules
    if key not in job.cache:
        job.cache[key] = _kept_bytes(job, layout)
    return job.cache[key]


def _kept_bytes(job: Job, layout: Layout) -> float:
    kinds = job.shape.layer_kinds
    nbytes = sum(count / job.shape.layers * sum(kept(job, layout, kind).values()) for kind, count in kinds)
    nbytes += adapters_kept_bytes(job.tuning, job.shape) / (layout.tp if layout.sequence_parallel else 1)
    default_selective = layout.recompute == "selective" and not layout.recomputed_modules
    return nbytes * (job.program.selective_kept_share if default_selective else 1.0)


def kept(job: Job, layout: Layout, kind: Layer) -> dict[str, float]:
    """Returns the bytes that a layer of one kind keeps of each token, by module; recomputed ones keep nothing.

    Korthikanti et al. 2022 (arXiv 2205.05198), 4: of two blocks with GeLU 10 h that tensor parallelism alone does not
    cut, 24 h that it cuts, 5 a·s for scores where attention is not fused. A gate adds a third to the MLP's part. Of
    grouped heads the output is as wide as the queries, and experts keep each token as often as it chose one. Products
    in 8 or 4 bits keep their inputs in these, but for attention's output and a router's input, which stay in bf16.
    A frozen weight keeps its input only for an adapter beside it.
    """
    shape, program, modules = job.shape.with_heads_of(kind), job.program, layout.recomputed_modules
    for_mixer, for_mlp = (keeps_input(job.tuning, shape, shared) for shared in (MIXER, UP))
    sequence_ranks = layout.tp if layout.sequence_parallel else 1
    input_bytes = LOW_PRECISION_BYTES.get(job.precision, 2.0) if program.keeps_low_precision else 2.0
    blocks = bool(kind.mixer) + bool(kind.mlp)
    normed_bytes = 2 * shape.hidden / sequence_ranks
    residuals = program.kept_uncut_bytes * shape.hidden + program.kept_cut_bytes * shape.hidden / sequence_ranks
    nbytes = {"residuals": residuals * blocks / 2}
    nbytes["residuals"] += 2 * shape.hidden * (shape.residual_streams - 1) / sequence_ranks * blocks
    nbytes["residuals"] -= normed_bytes * blocks
    if kind.mixer:
        own_norm = kind.mixer == "attention" and bool(up_projections(shape))
        recomputed_norm = own_norm and "layernorm" in modules
        nbytes["mixer's input"] = 0.0 if recomputed_norm else for_mixer * normed_bytes * input_bytes / 2
    if kind.mixer == "attention":
        output_dim = shape.heads * shape.value_dim
        qkv_dim = shape.heads * shape.head_dim + shape.kv_heads * (shape.head_dim + shape.value_dim)
        nbytes["heads"] = 0.0 if "mla_up_proj" in modules else 0.75 * program.kept_head_bytes * qkv_dim / layout.tp
        nbytes["attention's output"] = 0.75 * program.kept_head_bytes * output_dim / layout.tp
        if "core_attn" in modules:  # the next product's input is left
            nbytes["attention's output"] *= input_bytes / 2
        recomputes_attention = layout.recompute == "selective" and (
            program.selective_attention if not modules else "core_attn" in modules
        )
        if not job.fused and not recomputes_attention:
            nbytes["scores"] = 5 * shape.heads * job.sequence / layout.cp / layout.tp
    elif kind.mixer == "linear" and shape.linear_mixer:
        nbytes["mixer"] = program.kept_head_bytes * shape.linear_mixer.kept_elements / layout.tp
    if kind.mlp == "dense":
        if "mlp" not in modules:  # else it starts from the residual, its norm being one with its first product
            nbytes["MLP's input"] = for_mlp * normed_bytes * input_bytes / 2
            nbytes["MLP"] = sum(_mlp(job, shape.ffn_hidden, input_bytes)) / layout.tp
    elif kind.mlp == "experts" and shape.experts:
        nbytes |= _experts(job, layout, input_bytes)
    return nbytes


def _experts(job: Job, layout: Layout, input_bytes: float) -> dict[str, float]:
    """Returns what experts, shared experts and their router keep."""
    shape, modules, experts = job.shape, layout.recomputed_modules, job.shape.experts
    assert experts is not None
    sequence_ranks = layout.tp if layout.sequence_parallel else 1
    nbytes = {"router's input": 0.0 if "layernorm" in modules or job.frozen else 2 * shape.hidden / sequence_ranks}
    if "moe" in modules:
        return nbytes
    width = experts.latent_dim or shape.hidden
    nbytes["tokens of experts"] = 0.0 if job.frozen else experts.top_k * input_bytes * width / sequence_ranks
    outputs, activated = _mlp(job, experts.top_k * experts.ffn_hidden, input_bytes)
    nbytes["experts"] = (outputs + (0.0 if "moe_act" in modules else activated)) / layout.tp
    if experts.shared_ffn_hidden and "shared_experts" not in modules:
        nbytes["shared experts"] = sum(_mlp(job, experts.shared_ffn_hidden, input_bytes)) / layout.tp
    return nbytes


def _mlp(job: Job, ffn_hidden: int, input_bytes: float) -> tuple[float, float]:
    """Returns what an MLP of that width keeps: the up projection's outputs, and the down projection's inputs."""
    kept = job.program.kept_ffn_bytes * (1.5 if job.shape.gated else 1.0) * ffn_hidden
    keeps_activated = job.shape.experts is None and keeps_input(job.tuning, job.shape, DOWN)
    return kept - 2 * ffn_hidden, (keeps_activated or not job.frozen) * input_bytes * ffn_hidden
