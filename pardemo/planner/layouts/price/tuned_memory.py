"""The bytes of a GPU in a fine-tune: of the loss, a layer's backward pass and the update, the moment that takes most.

A sum of all that ever lies there would be too much: logits are gone when the update makes its copies. What each moment
holds is read from the sources of Transformers' models, PEFT and DeepSpeed 0.19, and held against dry runs of them.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from pardemo.planner.estimate import BUILT_SHARDED, CONTEXT_BYTES, NCCL_BYTES, Estimate
from pardemo.planner.layouts.model.shape import Shape
from pardemo.planner.layouts.model.tuning import STATES, Tuning, adapted, adapter_params, trained_params, weight_bytes
from pardemo.planner.layouts.price.engine_rules import stage_of

LOGITS = 12.0  # of each: in fp32, its softmax and its gradient (``ForCausalLMLoss`` of Transformers)
FUSED = 1024  # tokens of a piece of a fused loss
BUCKET = 500_000_000  # DeepSpeed's ``reduce_bucket_size`` and ``allgather_bucket_size``, elements
LIVE = 1_000_000_000  # its ``stage3_max_reuse_distance``: what is needed again sooner stays gathered
SUB_GROUP = 1_000_000_000  # elements that stage 3 updates at once (``sub_group_size``)
ENGINES = ("plain", "zero-0", "zero-1", "zero-2", "zero-3", "fsdp2")


@dataclass(frozen=True)
class Overheads:
    """What no source says, in bytes: fitted to every second one of Qwen's 57 runs (``finetune_fit``).

    Args:
        allocator: what torch's allocator keeps beside tensors, and libraries' workspaces.
        logits_of_int4: of each logit beside GPTQ's weights, whose model computes in fp16.
    """

    allocator: float = 2.0e9
    logits_of_int4: float = 8.0


OVERHEADS = Overheads()


@dataclass(frozen=True)
class FineTune:
    """One rank's share of a fine-tune.

    Args:
        engine: ``plain`` (16-bit weights and states of torch's optimizer, one process or DDP), DeepSpeed's ``zero-0``
            to ``zero-3``, ``fsdp2`` (fp32 shards of what is trained). ranks: that share states.
        batch: samples of a micro-batch; sequence: tokens of each. checkpointing: each layer is recomputed.
        fused: whether attention is; else its scores are kept, in fp32 and in 16 bits.
        accumulation: micro-batches of a step; offload: as DeepSpeed's, ``none``, ``optimizer``,
            ``optimizer+parameters``. bucket: elements of DeepSpeed's buckets.
        tp, pp: tensor-parallel ranks and pipeline stages that each of the ``ranks`` is made of.
    """

    shape: Shape
    tuning: Tuning
    engine: str = "plain"
    ranks: int = 1
    batch: int = 1
    sequence: int = 1024
    fused: bool = True
    checkpointing: bool = True
    accumulation: int = 1
    offload: str = "none"
    bucket: float = BUCKET
    tp: int = 1
    pp: int = 1

    def __post_init__(self):
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {self.engine!r}")
        for name in ("ranks", "batch", "sequence", "accumulation"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {value!r}")
        if self.shape.pattern:
            raise ValueError(
                f"{self.shape.name}: fine-tunes of models with state spaces are not planned; --search and --explain "
                "plan their training"
            )

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def but(self, **changes: Any) -> "FineTune":
        """This job with some things changed."""
        return replace(self, **changes)

    @property
    def stage(self) -> int | None:
        """DeepSpeed's ZeRO stage."""
        return stage_of(self.engine)


def kept_of_a_token(shape: Shape, tuning: Tuning, scores: int = 0, inputs: bool = False, tp: int = 1) -> float:
    """Bytes that Transformers' decoder layer keeps of a token for its backward pass.

    Of each norm in fp32 its input, and normalised what its weights are multiplied with if these are trained; LayerNorm
    is one operation, which keeps its input. Attention keeps queries, keys, values and its output; an MLP what its
    activation and the gate's product need. A weight that is trained needs its input; LoRA a copy of it with some
    numbers dropped, and which ones.

    Args:
        scores: tokens whose scores are kept, where attention is not fused. inputs: whether frozen weights' inputs are
            kept, too (``LinearFunctionForZeroStage3`` of DeepSpeed does). tp: tensor-parallel ranks, which cut all but
            the norms' part.
    """
    full, h, m = not tuning.lora, shape.hidden, _middle(shape)
    queries, others = shape.heads * shape.head, shape.groups * (shape.head + shape.value)
    norm = 8.0 * full + 4.0 * (not full) if shape.gated else 2.0 + 2.0 * full
    of_heads = (4.0 + 2.0 * full) * (queries + shape.groups * shape.head)
    whole = shape.norms * norm * h
    kept = of_heads if shape.head_norms else 0.0
    kept += 6 * shape.heads * scores + 2 * (queries + others + shape.heads * shape.value)
    kept += (6 + 2 * full) * m if shape.gated else (2 + 2 * full) * m
    kept += 6 * m + 2 * h if shape.by_hand else 0.0
    if tuning.lora and inputs:
        kept += 4 * h + 2 * m
    if tuning.lora:
        each = (3 if tuning.dropout else 2) + 4 * tuning.adapters_fp32
        modules = adapted(tuning, shape)
        kept += sum(each * width + 2 * tuning.rank for width, _ in modules)
    return whole + kept / tp


def _middle(shape: Shape) -> float:
    """An MLP's width that a token goes through, on average over the layers."""
    total = 0.0
    for kind, count in shape.kinds:
        if kind.mlp == "dense":
            total += count * shape.middle
        elif kind.mlp == "experts" and shape.experts:
            total += count * (shape.experts.chosen * shape.experts.middle + shape.experts.shared)
    return total / shape.layers


def states(job: FineTune) -> dict[str, float]:
    """What stays over a step: weights, gradients, the optimizer's states."""
    shape, tuning, n, cut = job.shape, job.tuning, job.ranks, job.tp * job.pp
    adapters = adapter_params(tuning, shape) / cut
    trained, weights = trained_params(tuning, shape) / cut, weight_bytes(tuning, shape) / cut * tuning.lora
    each, width = _states(job), 2.0
    if job.engine == "plain" and trained:  # adapters may be in fp32 beside weights in 16 bits
        own = 4.0 if tuning.base == "fp32" else 2.0
        width = own + (4.0 - own) * tuning.adapters_fp32 * adapters / trained
        each = 2 * width if tuning.optimizer in ("adamw", "adamw-foreach") else each
    elif job.engine == "fsdp2":  # fp32 shards, which are the master copy
        width = 4.0
    parameters, gradients, held = width * trained, width * trained, each * trained
    stage = 3 if job.engine == "fsdp2" else job.stage or 0
    held /= n if stage >= 1 else 1
    gradients /= n if stage >= 2 else 1
    if stage == 3:
        parameters, weights = parameters / n, weights / n
    if job.offload != "none":
        held, gradients = 0.0, (0.0 if stage >= 2 else gradients)
    if job.offload == "optimizer+parameters":
        parameters, weights = 0.0, 0.0
    return {
        "parameters": parameters, "frozen parameters": weights, "gradients": gradients, "optimizer states": held,
    }  # fmt: skip


def _states(job: FineTune) -> float:
    """Bytes of the optimizer's states of a trained parameter, with DeepSpeed's master copy in fp32."""
    return STATES[job.tuning.optimizer] + (4 if job.stage is not None else 0)


def moments(job: FineTune, overheads: Overheads = OVERHEADS) -> dict[str, dict[str, float]]:
    """Bytes by line at the loss, in the backward pass of a layer, and in the update."""
    shape, tuning, h = job.shape, job.tuning, job.shape.hidden
    always = states(job)
    kept = kept_of_a_token(shape, tuning, 0 if job.fused else job.sequence, job.stage == 3, job.tp)
    stored = 2.0 * h if job.checkpointing else kept
    ends = (10.0 if shape.gated and not tuning.lora else 6.0) * h  # the embeddings, the last norm
    in_flight = min(job.pp, job.accumulation)
    activations = job.tokens * (in_flight * shape.layers / job.pp * stored + ends)
    made = min(job.tokens * tuning.labels, FUSED if tuning.fused_loss else math.inf)
    each = overheads.logits_of_int4 if tuning.base == "int4" else LOGITS
    logits = each * shape.vocabulary * made / job.tp
    passing = {"gathered parameters": _gathered(job), "buckets": _buckets(job)}
    before = dict(always)
    if job.accumulation == 1 and job.stage not in (2, 3):  # they are made on the way
        before["gradients"] = 0.0 if tuning.lora else 2.0 * shape.head_params / job.tp
    loss = before | passing | {"activations": activations, "logits": logits}
    if job.stage == 2 and job.ranks > 1:  # made when the first gradient is there
        passing["buckets"] = 2 * job.bucket
    one = job.tokens * ((kept if job.checkpointing else 0.0) + 4 * _middle(shape) / job.tp + 4 * h)
    below = activations - job.tokens * (stored + ends)  # without the last layer's, nor what follows it
    late = tuning.lora and job.stage == 2  # a bucket comes with the first gradient, LoRA's when the layer is done
    backward = always | passing | {"activations": below if late else activations - 2 * job.tokens * h}
    backward["temporaries"] = one
    if job.engine == "fsdp2" and job.ranks > 1:  # a layer that is whole; its gradients on their way, if it has any
        layer = _layer_bytes(job)
        whole = passing["gathered parameters"] + layer
        backward |= {"gathered parameters": whole, "buckets": (1 if tuning.lora else 2) * layer}
    update = always | {"temporaries": _update(job)}
    if job.stage == 1:  # the others' parts are given back first
        update["gradients"] = always["gradients"] / job.ranks
    found = {"loss": loss, "backward": backward, "update": update}
    if job.engine == "fsdp2" and job.ranks > 1:  # the root's and the first layer's, and what they are copied from
        found["first layer"] = always | {"gathered parameters": whole, "buckets": whole}
        found["last layers"] = always | {"gathered parameters": whole, "buckets": 2 * layer, "activations": below}
    return found


def _gathered(job: FineTune) -> float:
    """Whole parameters that stage 3 or FSDP2 has gathered when the loss is there.

    Stage 3 keeps what it needs again before it has gone through :data:`LIVE` elements; FSDP2 the root's, which are the
    embedding, the head, and a layer on either side.
    """
    shape = job.shape
    if job.ranks == 1 or job.engine not in ("zero-3", "fsdp2"):
        return 0.0
    if job.engine == "fsdp2":
        return 2.0 * shape.ends_params / job.tp
    return min(2.0 * shape.params / job.tp, max(2.0 * LIVE, 2 * shape.head_params / job.tp + _layer_bytes(job)))


def _buckets(job: FineTune) -> float:
    """Buffers of what is on its way: stage 1's and 3's of gradients, FSDP2's of a layer."""
    if job.ranks == 1:
        return 0.0
    if job.engine in ("zero-1", "zero-3"):
        return 2 * job.bucket
    if job.engine == "fsdp2":
        return _layer_bytes(job)
    return 0.0


def _layer_bytes(job: FineTune) -> float:
    """Of a layer's weights in 16 bits, on a tensor-parallel rank."""
    return 2 * (job.shape.params - job.shape.ends_params) / job.shape.layers / job.tp


def _update(job: FineTune) -> float:
    """What the update makes: DeepSpeed's gradients in fp32, of what it owns; torch's a list of square roots."""
    trained = trained_params(job.tuning, job.shape) / (job.tp * job.pp)
    if job.stage is not None:
        owned = trained / (job.ranks if job.stage else 1)
        at_once = min(owned, SUB_GROUP) if job.stage == 3 else owned
        return 0.0 if job.offload != "none" else (6 if job.stage else 4) * at_once
    return 2 * trained if job.engine == "plain" and job.tuning.optimizer == "adamw-foreach" else 0.0


def peak(job: FineTune, overheads: Overheads = OVERHEADS) -> Estimate:
    """The fullest moment of a step, with what the allocator and CUDA take; its ``phase`` is a moment's name."""
    found = moments(job, overheads)
    name = max(found, key=lambda moment: sum(found[moment].values()))
    lines = {line: nbytes for line, nbytes in found[name].items() if nbytes}
    lines["allocator"] = overheads.allocator
    lines["CUDA context"] = CONTEXT_BYTES
    if groups := sum(size > 1 for size in (job.ranks, job.tp, job.pp)):
        lines["NCCL"] = groups * NCCL_BYTES
    building = None
    if job.engine in BUILT_SHARDED:
        building = 2.0 * job.shape.params / (job.tp * job.pp) + CONTEXT_BYTES
    return Estimate(lines, name, building)
