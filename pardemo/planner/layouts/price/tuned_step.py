"""A fine-tune's step in seconds: layers as of any program, and what DeepSpeed and FSDP2 really do.

DeepSpeed's stages 1 and 2 send more than the paper's 2Ψ, and stage 3 less than 3Ψ where it keeps what it needs again:
the bytes here are those of its source, and the tests hold them against dry runs of the engines.
"""

from dataclasses import dataclass

from pardemo.formulas.tensor_parallel import block, phi
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.job.machines import Machine
from pardemo.planner.layouts.job.stacks import Stack
from pardemo.planner.layouts.model.tuning import BASES, adapted_parts, trained_params
from pardemo.planner.layouts.price import engine_rules
from pardemo.planner.layouts.price.engine_rules import TimedStep
from pardemo.planner.layouts.price.tuned_memory import LIVE, FineTune
from pardemo.planner.layouts.price.work import head, layer

#: Transformers' models under the Trainer (``finetune_fit``). Norms, rotations and activations are operations of their
#: own, through memory one by one: ``whole`` and ``cut`` by LLaMA-7B in full on A800s. PEFT's adapters go through it 2.5
#: times as often as ones of 16 bits without dropout: they cast, drop and add in fp32. DeepSpeed's stages 1 to 3 handle
#: each gradient in Python (a hook, a copy to its bucket): Qwen's full runs take as long at 256 tokens as at 2,048.
TRANSFORMERS = Stack(
    "transformers", products=0.85, small=200, whole=120, cut=120, launch_s=4e-3, gradient_s=0.6e-3,
    adapters=2.5, about="Qwen's table of fine-tunes on A100, and LLaMA-7B on A800s", can=frozenset({"lora"}),
)  # fmt: skip
#: The same where norms and rotations are kernels of FlashAttention's, as Qwen's own code takes them: its table's runs.
FUSED_NORMS = TRANSFORMERS.but(name="transformers, fused norms", whole=30, cut=30)
#: Bytes through memory of a frozen weight in few bits each time that it is unpacked to be multiplied with: by what
#: Qwen's Q-LoRA runs take longer than its LoRA runs.
UNPACKED = 18.0
#: What LoRA's backward pass with recomputation gathers under stage 3: so many times the parameters, less 0.8 of what is
#: kept; between dry runs of 3.8B, 7.2B and 13.9B, which it meets within 1 %.
FROZEN_AGAIN = 1.65


@dataclass(frozen=True)
class TunedStep(TimedStep):
    """Seconds of an optimizer step by part; communication is what is not hidden. ``sent_bytes``: of a rank."""

    parts: dict[str, float]
    sent_bytes: float


def tuned_step(
    job: FineTune, machine: Machine, overlap: bool | None = None, program: Stack = TRANSFORMERS
) -> TunedStep:
    """A step of ``job.accumulation`` micro-batches on each of ``job.ranks`` GPUs.

    ``overlap``: whether DeepSpeed sends beside the backward pass (``overlap_comm``); None: its default, stage 3 alone.
    ``program``: its constants.
    """
    work = Job(job.shape, machine, program, job.sequence, job.fused, tuning=job.tuning)
    layout = Layout(
        job.tp, dp=job.ranks, pp=job.pp, micro_batch=job.batch, recompute="full" if job.checkpointing else "none"
    )
    parts: dict[str, float] = {}
    ends = head(work, layout).seconds  # of all tokens, and made of those that have a label
    for of, count in ((_mean(work, layout), job.shape.layers / job.pp), (ends, job.tuning.labels)):
        for name, seconds in of.items():
            parts[name] = parts.get(name, 0.0) + count * seconds
    if BASES[job.tuning.base] < 2:
        passes = 3 if job.checkpointing else 2
        packed = (job.shape.params - job.shape.ends_params) / (job.tp * job.pp)
        unpacked = passes * packed * UNPACKED / machine.memory_bytes_per_s
        parts["memory bandwidth"] = parts.get("memory bandwidth", 0.0) + unpacked
    if job.stage:
        parts["launching kernels"] = _waited(job, program, parts)
    busy, m = sum(parts.values()), job.accumulation
    parts = {name: m * seconds for name, seconds in parts.items()}
    if job.pp > 1:
        parts["pipeline bubble"] = (job.pp - 1) * busy
    each, once = sent_bytes(job)
    rounds = engine_rules.reductions(job.engine, m)
    if job.ranks > 1:
        rate = machine.rate(job.ranks, job.tp)
        shown = engine_rules.exposed(job.engine, each / rate, busy, overlap)
        parts["data-parallel traffic"] = rounds * shown + once / rate + 2 * machine.latency(job.ranks, job.tp)
    trained, gpus = trained_params(job.tuning, job.shape), job.ranks * job.tp * job.pp
    if job.offload == "none":
        owned = trained / (gpus if job.stage or job.engine == "fsdp2" else job.tp * job.pp)
        parts["optimizer"] = 26 * owned / machine.memory_bytes_per_s  # gradients, copy, moments; read and written
    else:
        on_host = min(machine.host_gpus, gpus) / gpus
        parts["offload"] = engine_rules.offload_seconds(
            job.offload, trained * on_host, job.shape.params * on_host, rounds, m, job.checkpointing
        )
    sent = rounds * each + once + m * tensor_bytes(job)
    return TunedStep({name: seconds for name, seconds in parts.items() if seconds}, sent)


def _waited(job: FineTune, program: Stack, parts: dict[str, float]) -> float:
    """Seconds of a micro-batch that a GPU waits for its host, where DeepSpeed handles every gradient."""
    waited = parts.get("launching kernels", 0.0)
    layers = job.shape.layers / job.pp
    host = layers * (program.launch_s * (4 if job.checkpointing else 3) / 3 + _gradients(job) * program.gradient_s)
    return max(waited, host - (sum(parts.values()) - waited))


def _gradients(job: FineTune) -> int:
    """A layer's tensors that have a gradient, by Transformers' usual modules: queries, keys and values apart."""
    if job.tuning.lora:
        return 2 * len(adapted_parts(job.tuning, job.shape))
    attention, mlp = 4, 2 + job.shape.gated
    return attention + mlp + job.shape.norms


def tensor_bytes(job: FineTune) -> float:
    """Bytes that a tensor-parallel rank sends in a micro-batch (Korthikanti et al. 2022, 4.2.1)."""
    if job.tp == 1:
        return 0.0
    exchanged = phi(job.batch, job.sequence, job.shape.hidden, job.tp, 2)
    return block("all" if job.checkpointing else "none") * exchanged * job.shape.layers / job.pp


def _mean(work: Job, layout: Layout) -> dict[str, float]:
    """Seconds of an average layer, by part."""
    found: dict[str, float] = {}
    for kind, count in work.shape.kinds:
        for name, seconds in layer(work, layout, kind).seconds.items():
            found[name] = found.get(name, 0.0) + seconds * count / work.shape.layers
    return found


def sent_bytes(job: FineTune) -> tuple[float, float]:
    """Bytes that a rank sends each time gradients are reduced, and once a step.

    DeepSpeed's default stages 0 to 2 all-reduce gradients (2Ψ), and 1 and 2 gather the parameters after the update.
    Stage 3 gathers what it has not kept (:data:`LIVE`) a second time for the backward pass, FSDP2 all but the root's.
    Under stage 3 a frozen layer that is recomputed is gathered for that, and half of the time again to go back through.
    """
    shape, share = job.shape, 1 - 1 / job.ranks
    cut = job.tp * job.pp
    trained, whole = trained_params(job.tuning, shape) / cut, shape.params / cut
    if job.engine in ("plain", "zero-0"):
        return 4 * trained * share, 0.0
    if job.engine in ("zero-1", "zero-2"):
        return 4 * trained * share, 2 * trained * share
    kept = shape.ends_params / cut if job.engine == "fsdp2" else min(whole, LIVE)
    again = whole - kept
    if job.stage == 3 and job.tuning.lora and job.checkpointing:
        again = max(0.0, FROZEN_AGAIN * whole - 0.8 * kept)
    return 2 * share * (whole + again + trained), 0.0
