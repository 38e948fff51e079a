"""Predicts a GPU's bytes in a fine-tune: at the loss, in a layer's backward pass, in the update; the most counts.

A sum of all that ever lies there would be too much: logits are gone when the update makes its copies. What each moment
holds is read from the sources of Transformers' models, PEFT and DeepSpeed 0.19, and held against dry runs of them.
"""

import math

from pardemo.planner.estimate import CONTEXT_BYTES, NCCL_BYTES, Memory
from pardemo.planner.layouts.fine_tune_step import LIVE_ELEMENTS
from pardemo.planner.layouts.job import Job, check_fine_tune
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.tuning import STATES, Tuning, adapted, adapter_params, trained_params, weight_bytes

LOGIT_BYTES = 12.0  # of a logit: in fp32, its softmax and its gradient (``ForCausalLMLoss`` of Transformers)
FUSED_LOSS_TOKENS = 1024  # of a piece of a fused loss
SUB_GROUP_ELEMENTS = 1_000_000_000  # that stage 3 updates at once (``sub_group_size``)
# No source states the next two: they are fitted to every second one of Qwen's 57 runs.
ALLOCATOR_BYTES = 2.0e9  # what torch's allocator keeps beside tensors, and libraries' workspaces
INT4_LOGIT_BYTES = 8.0  # of a logit beside GPTQ's weights, whose model computes in fp16


def kept_of_a_token(shape: Shape, tuning: Tuning, scores: int = 0, inputs: bool = False, tp: int = 1) -> float:
    """Returns the bytes that Transformers' decoder layer keeps of a token for its backward pass.

    Of each norm in fp32 its input, and normalised what its weights are multiplied with if these are trained; LayerNorm
    is one operation, which keeps its input. Attention keeps queries, keys, values and its output; an MLP what its
    activation and the gate's product need. A weight that is trained needs its input; LoRA a copy of it with some
    numbers dropped, and which ones.

    Args:
        scores: tokens whose scores are kept, where attention is not fused. inputs: whether frozen weights' inputs are
            kept, too (``LinearFunctionForZeroStage3`` of DeepSpeed does). tp: tensor-parallel ranks, which cut all but
            the norms' part.
    """
    trains_all, h, m = not tuning.lora, shape.hidden, _mean_ffn_hidden(shape)
    queries, keys_values = shape.heads * shape.head_dim, shape.kv_heads * (shape.head_dim + shape.value_dim)
    norm = 8.0 * trains_all + 4.0 * (not trains_all) if shape.gated else 2.0 + 2.0 * trains_all
    of_heads = (4.0 + 2.0 * trains_all) * (queries + shape.kv_heads * shape.head_dim)
    uncut = shape.norms_per_layer * norm * h
    kept = of_heads if shape.qk_norm else 0.0
    kept += 6 * shape.heads * scores + 2 * (queries + keys_values + shape.heads * shape.value_dim)
    kept += (6 + 2 * trains_all) * m if shape.gated else (2 + 2 * trains_all) * m
    kept += 6 * m + 2 * h if shape.unfused_activation else 0.0
    if tuning.lora and inputs:
        kept += 4 * h + 2 * m
    if tuning.lora:
        adapter_bytes = (3 if tuning.dropout else 2) + 4 * tuning.adapters_fp32
        modules = adapted(tuning, shape)
        kept += sum(adapter_bytes * width + 2 * tuning.rank for width, _ in modules)
    return uncut + kept / tp


def _mean_ffn_hidden(shape: Shape) -> float:
    """Returns the MLP width that a token goes through, on average over the layers."""
    total = 0.0
    for kind, count in shape.layer_kinds:
        if kind.mlp == "dense":
            total += count * shape.ffn_hidden
        elif kind.mlp == "experts" and shape.experts:
            total += count * (shape.experts.top_k * shape.experts.ffn_hidden + shape.experts.shared_ffn_hidden)
    return total / shape.layers


def states(job: Job, layout: Layout) -> dict[str, float]:
    """Returns the bytes that stay over a step: weights, gradients, the optimizer's states."""
    shape, tuning, n, engine = job.shape, job.tuning, layout.dp, job.program.engine
    model_parallel = layout.tp * layout.pp
    adapters = adapter_params(tuning, shape) / model_parallel
    trained = trained_params(tuning, shape) / model_parallel
    frozen = weight_bytes(tuning, shape) / model_parallel * tuning.lora
    # with DeepSpeed's master copy in fp32
    state_bytes, param_bytes = STATES[tuning.optimizer] + (4 if job.program.deepspeed else 0), 2.0
    if engine == "torch" and trained:  # adapters may be in fp32 beside weights in 16 bits
        base_bytes = 4.0 if tuning.base == "fp32" else 2.0
        param_bytes = base_bytes + (4.0 - base_bytes) * tuning.adapters_fp32 * adapters / trained
        state_bytes = 2 * param_bytes if tuning.optimizer in ("adamw", "adamw-foreach") else state_bytes
    elif engine == "fsdp2":  # fp32 shards, which are the master copy
        param_bytes = 4.0
    parameters, gradients, optimizer_states = param_bytes * trained, param_bytes * trained, state_bytes * trained
    stage = layout.zero_stage
    optimizer_states /= n if stage >= 1 else 1
    gradients /= n if stage >= 2 else 1
    if stage == 3:
        parameters, frozen = parameters / n, frozen / n
    if layout.host_states != "none":
        optimizer_states, gradients = 0.0, (0.0 if stage >= 2 else gradients)
    if layout.host_states == "optimizer+parameters":
        parameters, frozen = 0.0, 0.0
    return {
        "parameters": parameters, "frozen parameters": frozen, "gradients": gradients,
        "optimizer states": optimizer_states,
    }  # fmt: skip


def moments(job: Job, layout: Layout) -> dict[str, dict[str, float]]:
    """Returns the bytes by line at the loss, in the backward pass of a layer, and in the update."""
    shape, tuning, h, fsdp2 = job.shape, job.tuning, job.shape.hidden, job.program.engine == "fsdp2"
    stage = layout.zero_stage if job.program.deepspeed else 0  # of DeepSpeed: what FSDP2 gathers has rules of its own
    recomputes, tokens = layout.recompute == "full", layout.micro_batch * job.sequence
    model_states = states(job, layout)
    kept = kept_of_a_token(shape, tuning, 0 if job.fused else job.sequence, stage == 3, layout.tp)
    layer_bytes = 2.0 * h if recomputes else kept
    ends = (10.0 if shape.gated and not tuning.lora else 6.0) * h  # the embeddings, the last norm
    in_flight = min(layout.pp, layout.accumulation)
    activations = tokens * (in_flight * shape.layers / layout.pp * layer_bytes + ends)
    logit_tokens = min(tokens * tuning.labels, FUSED_LOSS_TOKENS if tuning.fused_loss else math.inf)
    logit_bytes = INT4_LOGIT_BYTES if tuning.base == "int4" else LOGIT_BYTES
    logits = logit_bytes * shape.vocabulary * logit_tokens / layout.tp
    buffers = {"gathered parameters": _gathered(job, layout), "buckets": _buckets(job, layout)}
    states_at_loss = dict(model_states)
    if layout.accumulation == 1 and stage not in (2, 3):  # they are made on the way
        states_at_loss["gradients"] = 0.0 if tuning.lora else 2.0 * shape.head_params / layout.tp
    loss = states_at_loss | buffers | {"activations": activations, "logits": logits}
    if stage == 2 and layout.dp > 1:  # made when the first gradient is there
        buffers["buckets"] = 2 * job.program.bucket_elements
    temporary_bytes = tokens * ((kept if recomputes else 0.0) + 4 * _mean_ffn_hidden(shape) / layout.tp + 4 * h)
    lower_activations = activations - tokens * (layer_bytes + ends)  # without the last layer's, nor what follows it
    late_bucket = tuning.lora and stage == 2  # a bucket comes with the first gradient, LoRA's when the layer is done
    kept_activations = lower_activations if late_bucket else activations - 2 * tokens * h
    backward = model_states | buffers | {"activations": kept_activations}
    backward["temporaries"] = temporary_bytes
    if fsdp2 and layout.dp > 1:  # a layer that is whole; its gradients on their way, if it has any
        layer = _layer_bytes(job, layout)
        gathered = buffers["gathered parameters"] + layer
        backward |= {"gathered parameters": gathered, "buckets": (1 if tuning.lora else 2) * layer}
    update = model_states | {"temporaries": _update(job, layout)}
    if stage == 1:  # the others' parts are given back first
        update["gradients"] = model_states["gradients"] / layout.dp
    by_moment = {"loss": loss, "backward": backward, "update": update}
    if fsdp2 and layout.dp > 1:  # the root's and the first layer's, and what they are copied from
        by_moment["first layer"] = model_states | {"gathered parameters": gathered, "buckets": gathered}
        last = {"gathered parameters": gathered, "buckets": 2 * layer, "activations": lower_activations}
        by_moment["last layers"] = model_states | last
    return by_moment


def _gathered(job: Job, layout: Layout) -> float:
    """Returns the bytes of whole parameters that stage 3 or FSDP2 has gathered when the loss is there.

    Stage 3 keeps what it needs again before it has gone through :data:`LIVE_ELEMENTS`; FSDP2 the root's, which are the
    embedding, the head, and a layer on either side.
    """
    shape = job.shape
    if layout.dp == 1 or layout.zero_stage < 3:
        return 0.0
    if not job.program.deepspeed:
        return 2.0 * shape.embedding_and_head_params / layout.tp
    kept_bytes = max(2.0 * LIVE_ELEMENTS, 2 * shape.head_params / layout.tp + _layer_bytes(job, layout))
    return min(2.0 * shape.params / layout.tp, kept_bytes)


def _buckets(job: Job, layout: Layout) -> float:
    """Returns the bytes of communication buffers: stage 1's and 3's of gradients, FSDP2's of a layer."""
    if layout.dp == 1:
        return 0.0
    if job.program.engine == "fsdp2":
        return _layer_bytes(job, layout)
    return 2 * job.program.bucket_elements if layout.zero_stage in (1, 3) else 0.0


def _layer_bytes(job: Job, layout: Layout) -> float:
    """Returns the bytes of a layer's weights in 16 bits, on a tensor-parallel rank."""
    return 2 * (job.shape.params - job.shape.embedding_and_head_params) / job.shape.layers / layout.tp


def _update(job: Job, layout: Layout) -> float:
    """Returns the bytes that the update allocates: of DeepSpeed gradients in fp32, of torch a list of square roots."""
    trained = trained_params(job.tuning, job.shape) / (layout.tp * layout.pp)
    stage = layout.zero_stage
    if job.program.deepspeed:
        owned = trained / (layout.dp if stage else 1)
        at_once = min(owned, SUB_GROUP_ELEMENTS) if stage == 3 else owned
        return 0.0 if layout.host_states != "none" else (6 if stage else 4) * at_once
    foreach = job.program.engine == "torch" and job.tuning.optimizer == "adamw-foreach"
    return 2 * trained if foreach else 0.0


def predict_peak(job: Job, layout: Layout) -> Memory:
    """Predicts the fullest moment of a step, with what the allocator and CUDA take; its ``phase`` is a moment's name.

    Raises:
        ValueError: the layout has what fine-tunes are not planned with.
    """
    check_fine_tune(job, layout)
    by_moment = moments(job, layout)
    name = max(by_moment, key=lambda moment: sum(by_moment[moment].values()))
    lines = {line: nbytes for line, nbytes in by_moment[name].items() if nbytes}
    lines["allocator"] = ALLOCATOR_BYTES
    lines["CUDA context"] = CONTEXT_BYTES
    if groups := sum(size > 1 for size in (layout.dp, layout.tp, layout.pp)):
        lines["NCCL"] = groups * NCCL_BYTES
    building = None
    if layout.zero_stage == 3:  # the engines of BUILT_SHARDED
        building = 2.0 * job.shape.params / (layout.tp * layout.pp) + CONTEXT_BYTES
    return Memory(lines, name, building)
