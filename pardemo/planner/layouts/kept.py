"""The bytes of each token that a layer keeps for its backward pass."""

from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.work import Job

#: Bytes of a product's input that is kept for the backward pass, with its scales, where they are not bf16's 2.
LOW = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


def kept_bytes(job: Job, layout: Layout) -> float:
    """Bytes that a layer keeps of each token for its backward pass, on one rank.

    Korthikanti et al. 2022 (arXiv 2205.05198), 4: of a block with GeLU 10 h that tensor parallelism alone does not
    cut, 24 h that it cuts, 5 a·s for scores where attention is not fused. A gate adds a third to the MLP's part.
    Products in 8 or 4 bits keep their inputs in these, but that of attention's output, which attention keeps in bf16.
    """
    shape, stack = job.shape, job.stack
    along = layout.tp if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return 2 * shape.hidden / along
    middle, inner = 0.0, 0.0
    for kind, count in shape.kinds:
        if kind.mlp == "dense":
            middle += count / shape.layers * shape.middle
        elif kind.mlp == "experts" and shape.experts:
            middle += count / shape.layers * (shape.experts.chosen * shape.experts.middle + shape.experts.shared)
        if kind.mixer == "attention":
            inner += count / shape.layers * (shape.heads * shape.head + shape.groups * (shape.head + shape.value))
        elif kind.mixer == "mamba" and shape.mamba:
            inner += count / shape.layers * (3 * shape.mamba.inner + 2 * shape.mamba.groups * shape.mamba.state)
    nbytes = stack.keeps_whole * shape.hidden + stack.keeps_split * shape.hidden / along
    gate = 1.5 if shape.gated else 1.0
    nbytes += (stack.keeps_heads * inner + stack.keeps_middle * gate * middle) / layout.tp
    if stack.keeps_low:
        nbytes -= (2 - LOW.get(job.precision, 2)) * (2 * shape.hidden / along + middle / layout.tp)
    selective = layout.recompute == "selective"
    if not job.fused and not (selective and stack.selective_attention):
        nbytes += 5 * shape.heads * job.sequence / layout.cp / layout.tp
    return nbytes * (stack.selective_keeps if selective else 1.0)
