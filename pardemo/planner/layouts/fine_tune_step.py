"""Computes what training engines send and offload in a step: DeepSpeed 0.19.8's stages, FSDP2, DDP."""

from pardemo.formulas.tensor_parallel import block, phi
from pardemo.planner.estimate import PredictedStep
from pardemo.planner.layouts.job import Job, check_fine_tune
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.micro_batch import BACKWARD_SHARE, Parts, head_seconds, layer_seconds
from pardemo.planner.layouts.programs import Program
from pardemo.planner.layouts.tuning import BASES, adapted_parts, trained_params

HIDDEN_SHARE = 0.8  # of the computation beside which something is sent, where an engine does so at all
#: DeepSpeed's ``stage3_max_reuse_distance``, elements: what is needed again sooner stays gathered.
LIVE_ELEMENTS = 1_000_000_000
#: A host's, of all its GPUs together, as DeepSpeed offloads: parameter by parameter, one thing after the other. PCIe
#: and memory could do several times as much. From LLaMA-7B on 8 A800s (2.3 and 2.2 times the step without offload) and
#: Falcon-7B on 8 A100s (DeepSpeed issue 3901).
HOST_COPY_BYTES_PER_S = 16e9
HOST_ADAM_PARAMS_PER_S = 1.3e9


def reductions(layout: Layout) -> int:
    """Counts the reductions of gradients in a step: stages 0 and 1, and DDP, wait for the last micro-batch."""
    return 1 if layout.zero_stage < 2 else layout.accumulation


def overlaps(program: Program, layout: Layout) -> bool:
    """Tells whether the engine sends while it computes: FSDP2 does, DeepSpeed by its ``overlap_comm``.

    Left out it is DeepSpeed's default: stage 3 alone. Stage 0 reduces after the backward pass whatever it says. The
    plain engine sends nothing here.
    """
    stage, setting = layout.zero_stage, program.overlap_comm
    if program.deepspeed:
        return stage > 0 and (stage == 3 if setting is None else bool(setting))
    return program.engine == "fsdp2"


def exposed_seconds(program: Program, layout: Layout, exchange_s: float, busy_s: float) -> float:
    """Returns the seconds of a micro-batch's exchange that its ``busy_s`` seconds of computation do not hide."""
    if not overlaps(program, layout):
        return exchange_s
    beside_s = busy_s * (BACKWARD_SHARE if layout.zero_stage in (1, 2) else 1)  # stages 1 and 2 send gradients alone
    return max(exchange_s - HIDDEN_SHARE * beside_s, (1 - HIDDEN_SHARE) * exchange_s)


def offload_seconds(
    host_states: str, updated: float, params: float, rounds: int, accumulation: int, checkpointing: bool
) -> float:
    """Returns the seconds that DeepSpeed's offload adds; a host's GPUs share memory, links, cores; nothing overlaps.

    Of each updated parameter: with every micro-batch the gradients so far to the GPU and back, 2 bytes each way (stages
    2 and 3), at the end the sum in fp32, 4 bytes, and the new parameter back, 2. Adam's update once. Offloaded
    parameters come with each pass of a micro-batch: forward, recomputation where there is one, backward.

    Args:
        host_states: of :data:`~pardemo.planner.estimate.HOST_STATES`. updated, params: parameters of one host's GPUs
            that are updated, and all. rounds: as :func:`reductions`.

    Source: ``async_accumulate_grad_in_cpu_via_gpu`` and ``partition_grads`` of DeepSpeed 0.19.8.
    """
    if host_states == "none":
        return 0.0
    copied = updated * (4 * (rounds - 1) + 4 + 2)
    if host_states == "optimizer+parameters":
        copied += (2 + checkpointing) * accumulation * 2 * params
    return copied / HOST_COPY_BYTES_PER_S + updated / HOST_ADAM_PARAMS_PER_S


#: Bytes through memory of a frozen weight in few bits each time that it is unpacked to be multiplied with: by what
#: Qwen's Q-LoRA runs take longer than its LoRA runs.
UNPACKED_BYTES = 18.0
#: What LoRA's backward pass with recomputation gathers under stage 3: so many times the parameters, less 0.8 of what is
#: kept; between dry runs of 3.8B, 7.2B and 13.9B, which it meets within 1 %.
FROZEN_AGAIN = 1.65


def tuned_step(job: Job, layout: Layout) -> PredictedStep:
    """Predicts a fine-tune's step of ``accumulation`` micro-batches on each data-parallel rank.

    Raises:
        ValueError: the layout has what fine-tunes are not planned with.
    """
    check_fine_tune(job, layout)
    shape, machine, tuning, m = job.shape, job.machine, job.tuning, layout.accumulation
    layers, recomputes = shape.layers / layout.pp, layout.recompute == "full"
    parts = Parts()
    for kind, count in shape.layer_kinds:
        parts.add_all(layer_seconds(job, layout, kind), layers * count / shape.layers)
    parts.add_all(head_seconds(job, layout), tuning.labels)  # of all tokens, and made of those that have a label
    if BASES[tuning.base] < 2:
        passes = 3 if recomputes else 2
        packed_params = (shape.params - shape.embedding_and_head_params) / (layout.tp * layout.pp)
        parts.add("memory bandwidth", passes * packed_params * UNPACKED_BYTES / machine.memory_bytes_per_s)
    if job.program.deepspeed and layout.zero_stage:
        parts.seconds["launching kernels"] = _waited(job, layout, parts)
    busy = parts.total
    parts = Parts({name: m * seconds for name, seconds in parts.seconds.items()})
    parts.add("pipeline bubble", (layout.pp - 1) * busy)
    reduced_bytes, step_bytes = sent_bytes(job, layout)
    rounds = reductions(layout)
    if layout.dp > 1:
        rate = machine.rate(layout.dp, layout.tp)
        exposed_s = exposed_seconds(job.program, layout, reduced_bytes / rate, busy)
        latency_s = 2 * machine.latency(layout.dp, layout.tp)
        parts.add("data-parallel traffic", rounds * exposed_s + step_bytes / rate + latency_s)
    trained, gpus = trained_params(tuning, shape), layout.gpus
    if layout.host_states == "none":
        owned = trained / (gpus if layout.sharding != "none" else layout.tp * layout.pp)
        moved = 26 * owned  # gradients, copy, moments; read and written
        parts.add("optimizer", moved / machine.memory_bytes_per_s)
    else:
        host_share = min(machine.host_gpus, gpus) / gpus
        parts.add("offload", offload_seconds(
            layout.host_states, trained * host_share, shape.params * host_share, rounds, m, recomputes
        ))  # fmt: skip
    sent = rounds * reduced_bytes + step_bytes + m * tensor_bytes(job, layout)
    tokens = layout.batch * job.sequence
    return PredictedStep(
        {name: seconds for name, seconds in parts.seconds.items() if seconds},
        tokens * shape.flops(job.sequence, frozen=job.frozen), job.peak_flops, tokens, gpus, (layers,) * layout.pp,
        sent,
    )  # fmt: skip


def _waited(job: Job, layout: Layout, parts: Parts) -> float:
    """Returns the seconds of a micro-batch that a GPU waits for its host, where DeepSpeed handles every gradient."""
    waiting_s, program = parts.seconds.get("launching kernels", 0.0), job.program
    launch_s = program.launch_s * (4 if layout.recompute == "full" else 3) / 3
    host_s = job.shape.layers / layout.pp * (launch_s + _gradients(job) * program.gradient_hook_s)
    return max(waiting_s, host_s - (parts.total - waiting_s))


def _gradients(job: Job) -> int:
    """Counts a layer's tensors with a gradient, by Transformers' usual modules: queries, keys and values apart."""
    if job.frozen:
        return 2 * len(adapted_parts(job.tuning, job.shape))
    attention, mlp = 4, 2 + job.shape.gated
    return attention + mlp + job.shape.norms_per_layer


def tensor_bytes(job: Job, layout: Layout) -> float:
    """Returns the bytes that a tensor-parallel rank sends in a micro-batch (Korthikanti et al. 2022, 4.2.1)."""
    if layout.tp == 1:
        return 0.0
    exchanged = phi(layout.micro_batch, job.sequence, job.shape.hidden, layout.tp, 2)
    return block("all" if layout.recompute == "full" else "none") * exchanged * job.shape.layers / layout.pp


def sent_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Returns the bytes that a rank sends each time gradients are reduced, and once a step.

    DeepSpeed's default stages 0 to 2 all-reduce gradients (2Ψ), and 1 and 2 gather the parameters after the update.
    Stage 3 gathers what it has not kept (:data:`LIVE_ELEMENTS`) a second time for the backward pass, FSDP2 all but the
    root's. Under stage 3 a frozen layer that is recomputed is gathered for that, and half of the time again to go back
    through.
    """
    shape, share = job.shape, 1 - 1 / layout.dp
    model_parallel, deepspeed = layout.tp * layout.pp, job.program.deepspeed
    trained, params = trained_params(job.tuning, shape) / model_parallel, shape.params / model_parallel
    if layout.sharding == "none":
        return 4 * trained * share, 0.0
    if layout.zero_stage < 3:
        return 4 * trained * share, 2 * trained * share
    kept = min(params, LIVE_ELEMENTS) if deepspeed else shape.embedding_and_head_params / model_parallel
    gathered_again = params - kept
    if deepspeed and job.frozen and layout.recompute == "full":
        gathered_again = max(0.0, FROZEN_AGAIN * params - 0.8 * kept)
    return 2 * share * (params + gathered_again + trained), 0.0
