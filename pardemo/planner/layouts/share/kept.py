"""The bytes of each token that a layer keeps for its backward pass."""

from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.model.recomputed import up_projections
from pardemo.planner.layouts.model.shape import Layer
from pardemo.planner.layouts.share import adapters
from pardemo.planner.layouts.share.adapters import DOWN, MIXER, UP, keeps_input

#: Bytes of a product's input that is kept for the backward pass, with its scales, where they are not bf16's 2.
LOW = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


def kept_bytes(job: Job, layout: Layout) -> float:
    """Bytes that a layer keeps of each token for its backward pass, on one rank; of several kinds, on average."""
    if layout.recompute == "full":
        return 2 * job.shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    kinds = job.shape.kinds
    nbytes = sum(count / job.shape.layers * sum(kept(job, layout, kind).values()) for kind, count in kinds)
    nbytes += adapters.kept_bytes(job.tuning, job.shape) / (layout.tp if layout.sequence_parallel else 1)
    own = layout.recompute == "selective" and not layout.modules
    return nbytes * (job.stack.selective_keeps if own else 1.0)


def kept(job: Job, layout: Layout, kind: Layer) -> dict[str, float]:
    """The same of a layer of one kind, by what keeps it, without what its recomputed modules throw away.

    Korthikanti et al. 2022 (arXiv 2205.05198), 4: of two blocks with GeLU 10 h that tensor parallelism alone does not
    cut, 24 h that it cuts, 5 a·s for scores where attention is not fused. A gate adds a third to the MLP's part. Of
    grouped heads the output is as wide as the queries, and experts keep each token as often as it chose one. Products
    in 8 or 4 bits keep their inputs in these, but for attention's output and a router's input, which stay in bf16.
    A frozen weight keeps its input only for an adapter beside it.
    """
    shape, stack, modules = job.shape, job.stack, layout.modules
    for_mixer, for_mlp = (keeps_input(job.tuning, shape, shared) for shared in (MIXER, UP))
    along = layout.tp if layout.sequence_parallel else 1
    low = LOW.get(job.precision, 2.0) if stack.keeps_low else 2.0
    blocks = bool(kind.mixer) + bool(kind.mlp)
    normed = 2 * shape.hidden / along
    found = {"residuals": (stack.keeps_whole * shape.hidden + stack.keeps_split * shape.hidden / along) * blocks / 2}
    found["residuals"] -= normed * blocks
    if kind.mixer:
        own_norm = kind.mixer == "attention" and bool(up_projections(shape))
        found["mixer's input"] = 0.0 if own_norm and "layernorm" in modules else for_mixer * normed * low / 2
    if kind.mixer == "attention":
        out = shape.heads * shape.value
        inner = shape.heads * shape.head + shape.groups * (shape.head + shape.value)
        found["heads"] = 0.0 if "mla_up_proj" in modules else 0.75 * stack.keeps_heads * inner / layout.tp
        found["attention's output"] = 0.75 * stack.keeps_heads * out / layout.tp
        if "core_attn" in modules:  # the next product's input is left
            found["attention's output"] *= low / 2
        scores = layout.recompute == "selective" and (
            stack.selective_attention if not modules else "core_attn" in modules
        )
        if not job.fused and not scores:
            found["scores"] = 5 * shape.heads * job.sequence / layout.cp / layout.tp
    elif kind.mixer == "mamba" and shape.mamba:
        inner = 3 * shape.mamba.inner + 2 * shape.mamba.groups * shape.mamba.state
        found["mixer"] = stack.keeps_heads * inner / layout.tp
    if kind.mlp == "dense":
        if "mlp" not in modules:  # else it starts from the residual, its norm being one with its first product
            found["MLP's input"] = for_mlp * normed * low / 2
            found["MLP"] = sum(_mlp(job, shape.middle, low)) / layout.tp
    elif kind.mlp == "experts" and shape.experts:
        found |= _experts(job, layout, low)
    return found


def _experts(job: Job, layout: Layout, low: float) -> dict[str, float]:
    """What experts, shared ones and their router keep."""
    shape, modules, of = job.shape, layout.modules, job.shape.experts
    assert of is not None
    along = layout.tp if layout.sequence_parallel else 1
    found = {"router's input": 0.0 if "layernorm" in modules or job.frozen else 2 * shape.hidden / along}
    if "moe" in modules:
        return found
    found["tokens of experts"] = 0.0 if job.frozen else of.chosen * low * shape.hidden / along
    first, acted = _mlp(job, of.chosen * of.middle, low)
    found["experts"] = (first + (0.0 if "moe_act" in modules else acted)) / layout.tp
    if of.shared and "shared_experts" not in modules:
        found["shared experts"] = sum(_mlp(job, of.shared, low)) / layout.tp
    return found


def _mlp(job: Job, middle: int, low: float) -> tuple[float, float]:
    """What an MLP of that width keeps: its first product's outputs, and its second one's inputs."""
    every = job.stack.keeps_middle * (1.5 if job.shape.gated else 1.0) * middle
    acted = job.shape.experts is None and keeps_input(job.tuning, job.shape, DOWN)
    return every - 2 * middle, (acted or not job.frozen) * low * middle
