"""A fine-tune's step in seconds: layers as of any program, and what DeepSpeed and FSDP2 really do.

DeepSpeed's stages 1 and 2 send more than the paper's 2Ψ, and stage 3 less than 3Ψ where it keeps what it needs again:
the bytes here are those of its source, and the tests hold them against dry runs of the engines.
"""

from pardemo.formulas.tensor_parallel import block, phi
from pardemo.planner.layouts.job.engines import engine_of
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.model.tuning import BASES, adapted_parts, trained_params
from pardemo.planner.layouts.price import engine_rules
from pardemo.planner.layouts.price.engine_rules import stage_of
from pardemo.planner.layouts.price.predicted import PredictedStep
from pardemo.planner.layouts.price.tuned_memory import LIVE
from pardemo.planner.layouts.price.work import Parts, head, layer

#: Bytes through memory of a frozen weight in few bits each time that it is unpacked to be multiplied with: by what
#: Qwen's Q-LoRA runs take longer than its LoRA runs.
UNPACKED = 18.0
#: What LoRA's backward pass with recomputation gathers under stage 3: so many times the parameters, less 0.8 of what is
#: kept; between dry runs of 3.8B, 7.2B and 13.9B, which it meets within 1 %.
FROZEN_AGAIN = 1.65


def tuned_step(job: Job, layout: Layout) -> PredictedStep:
    """A step of ``accumulation`` micro-batches on each data-parallel rank."""
    shape, machine, tuning, m = job.shape, job.machine, job.tuning, layout.accumulation
    engine, layers = engine_of(job, layout), shape.layers / layout.pp
    stage, again = stage_of(engine), layout.recompute == "full"
    parts = Parts()
    for kind, count in shape.kinds:
        parts.more(layer(job, layout, kind), layers * count / shape.layers)
    parts.more(head(job, layout), tuning.labels)  # of all tokens, and made of those that have a label
    if BASES[tuning.base] < 2:
        passes = 3 if again else 2
        packed = (shape.params - shape.ends_params) / (layout.tp * layout.pp)
        parts.add("memory bandwidth", passes * packed * UNPACKED / machine.memory_bytes_per_s)
    if stage:
        parts.seconds["launching kernels"] = _waited(job, layout, parts)
    busy = parts.total
    parts = Parts({name: m * seconds for name, seconds in parts.seconds.items()})
    parts.add("pipeline bubble", (layout.pp - 1) * busy)
    each, once = sent_bytes(job, layout)
    rounds = engine_rules.reductions(engine, m)
    if layout.dp > 1:
        rate = machine.rate(layout.dp, layout.tp)
        shown = engine_rules.exposed(engine, each / rate, busy, job.stack.overlaps)
        waits = 2 * machine.latency(layout.dp, layout.tp)
        parts.add("data-parallel traffic", rounds * shown + once / rate + waits)
    trained, gpus = trained_params(tuning, shape), layout.gpus
    if layout.on_host == "none":
        owned = trained / (gpus if layout.sharding != "none" else layout.tp * layout.pp)
        moved = 26 * owned  # gradients, copy, moments; read and written
        parts.add("optimizer", moved / machine.memory_bytes_per_s)
    else:
        here = min(machine.host_gpus, gpus) / gpus
        parts.add("offload", engine_rules.offload_seconds(
            layout.on_host, trained * here, shape.params * here, rounds, m, again
        ))  # fmt: skip
    sent = rounds * each + once + m * tensor_bytes(job, layout)
    tokens = layout.batch * job.sequence
    return PredictedStep(
        {name: seconds for name, seconds in parts.seconds.items() if seconds},
        tokens * shape.flops(job.sequence, frozen=job.frozen), job.peak_flops, tokens, gpus, (layers,) * layout.pp,
        sent,
    )  # fmt: skip


def _waited(job: Job, layout: Layout, parts: Parts) -> float:
    """Seconds of a micro-batch that a GPU waits for its host, where DeepSpeed handles every gradient."""
    waited, stack = parts.seconds.get("launching kernels", 0.0), job.stack
    launches = stack.launch_s * (4 if layout.recompute == "full" else 3) / 3
    host = job.shape.layers / layout.pp * (launches + _gradients(job) * stack.gradient_s)
    return max(waited, host - (parts.total - waited))


def _gradients(job: Job) -> int:
    """A layer's tensors that have a gradient, by Transformers' usual modules: queries, keys and values apart."""
    if job.frozen:
        return 2 * len(adapted_parts(job.tuning, job.shape))
    attention, mlp = 4, 2 + job.shape.gated
    return attention + mlp + job.shape.norms


def tensor_bytes(job: Job, layout: Layout) -> float:
    """Bytes that a tensor-parallel rank sends in a micro-batch (Korthikanti et al. 2022, 4.2.1)."""
    if layout.tp == 1:
        return 0.0
    exchanged = phi(layout.micro_batch, job.sequence, job.shape.hidden, layout.tp, 2)
    return block("all" if layout.recompute == "full" else "none") * exchanged * job.shape.layers / layout.pp


def sent_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Bytes that a rank sends each time gradients are reduced, and once a step.

    DeepSpeed's default stages 0 to 2 all-reduce gradients (2Ψ), and 1 and 2 gather the parameters after the update.
    Stage 3 gathers what it has not kept (:data:`LIVE`) a second time for the backward pass, FSDP2 all but the root's.
    Under stage 3 a frozen layer that is recomputed is gathered for that, and half of the time again to go back through.
    """
    shape, share = job.shape, 1 - 1 / layout.dp
    cut, engine = layout.tp * layout.pp, engine_of(job, layout)
    trained, whole = trained_params(job.tuning, shape) / cut, shape.params / cut
    if layout.sharding == "none":
        return 4 * trained * share, 0.0
    if engine in ("zero-1", "zero-2"):
        return 4 * trained * share, 2 * trained * share
    kept = shape.ends_params / cut if engine == "fsdp2" else min(whole, LIVE)
    again = whole - kept
    if engine == "zero-3" and job.frozen and layout.recompute == "full":
        again = max(0.0, FROZEN_AGAIN * whole - 0.8 * kept)
    return 2 * share * (whole + again + trained), 0.0
