"""Predicts a step's seconds: layers on stages, all of which wait for the slowest, and exchanges of replicas."""

import math

from pardemo.planner import hardware
from pardemo.planner.estimate import PredictedStep
from pardemo.planner.layouts.fine_tune_step import tuned_step
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout, check_layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.micro_batch import BACKWARD_PER_FORWARD, Parts, head_seconds, layer_seconds
from pardemo.planner.layouts.per_rank import Owned, kept_bytes, owned_layer, owned_trained_params, trained_layer
from pardemo.planner.layouts.shape import Shape


def stage_layers(job: Job, layout: Layout) -> list[int]:
    """Returns the layers of each stage.

    A program that balances stages counts the head as the layers that have as many weights, and goes to the next stage
    when the last one has its share: nanotron's ``build_model`` (huggingface/nanotron, ``models/base.py``).
    """
    shape, pp = job.shape, layout.pp
    if not job.program.balanced_stages:
        if job.program.embedding_and_loss_as_layers and shape.layers % (pp * layout.chunks) and pp > 1:
            in_pieces = piece_layers(shape, pp * layout.chunks)
            return [sum(in_pieces[stage::pp]) for stage in range(pp)]
        layers, rest = divmod(shape.layers, pp)
        return [layers + (stage < rest) for stage in range(pp)]
    split = [0] * pp
    for stage in _balanced(shape, pp)[: shape.layers]:
        split[stage] += 1
    return split


def piece_layers(shape: Shape, count: int) -> list[int]:
    """Returns the layers of each piece of the model where they do not divide, as Megatron-core's recipes cut it.

    The embedding, the loss and each layer of multi-token prediction take a layer's place where the pieces come out even
    so: 126 layers are cut into 128 pieces. Else the loss does, and the first pieces have a layer more.
    """
    ends = 1 + shape.mtp_layers
    layers, remainder = divmod(shape.layers + 1 + ends, count)
    if remainder == 0 and layers >= ends:
        return [layers - 1, *[layers] * (count - 2), layers - ends]
    layers, remainder = divmod(shape.layers + ends, count)
    split = [layers + (index < remainder) for index in range(count)]
    missing = max(0, ends - split[-1])
    split[-1] = max(0, split[-1] - ends)
    for index in range(count - 2, count - 2 - missing, -1):
        split[index] -= 1
    return split


def idle_stages(job: Job, layout: Layout) -> int:
    """Counts the stages that a program that balances them leaves empty: it cannot run such a pipeline.

    nanotron's ``check_model_has_grad`` asks for more layers or fewer stages then.
    """
    return layout.pp - 1 - _balanced(job.shape, layout.pp)[-1] if job.program.balanced_stages else 0


def refusal_of_layout(job: Job, layout: Layout) -> str:
    """Says why a layout cannot have run: an impossible cut, or a stage that is left with nothing; "" where it can."""
    try:
        check_layout(layout, job.shape, layout.gpus, job.sequence, job.program.embedding_and_loss_as_layers)
    except ValueError as error:
        return str(error)
    if idle := idle_stages(job, layout):
        return f"{job.program.name} leaves {idle} of PP {layout.pp} stages without anything; take fewer"
    return ""


def _balanced(shape: Shape, pp: int) -> list[int]:
    """Returns the stage of each layer, and of what follows them: norm, head, conversion to fp32, loss."""
    layer_params = shape.attention_params + sum(matmul.params for matmul in shape.mlp_matmuls(shape.ffn_hidden))
    stage_params = (shape.layers * layer_params + shape.head_params) / pp
    placement, placed, stage = [], 0.0, 0
    for cost in (*[layer_params] * shape.layers, 0, shape.head_params, 0, 0):
        placement.append(stage)
        placed += cost
        if placed > stage_params * (stage + 1) and stage < pp - 1:
            stage += 1
    return placement


def predict_step(job: Job, layout: Layout) -> PredictedStep:
    """Predicts a step's time, part by part.

    From its first micro-batch on the slowest stage has no pause; before and after it the others work, which is the
    bubble. Interleaved, that is a ``chunks``-th (Narayanan et al. 2021, arXiv 2104.04473, 2.2). In ZB-H1 gradients of
    weights, a third of a micro-batch, fill it (Qi et al. 2023, arXiv 2401.10241, 2.1).

    A fine-tune under Transformers' Trainer sends as its engine does (:func:`tuned_step`).
    """
    if job.program.engine:
        return tuned_step(job, layout)
    shape, machine, program = job.shape, job.machine, job.program
    mean, last = _micro_batch(job, layout)
    split = stage_layers(job, layout)
    busy = [count * mean.total for count in split]
    busy[-1] += last.total
    slowest = max(range(layout.pp), key=busy.__getitem__)
    parts, m = Parts(), layout.accumulation
    parts.add_all(mean, m * split[slowest])
    if slowest == layout.pp - 1:
        parts.add_all(last, m)
    if layout.offloaded_layers:
        parts.add("offload", m * _offloaded(job, layout, mean, split[slowest]))
    if layout.pp > 1:
        tokens = layout.micro_batch * job.sequence / layout.cp
        nbytes = 2 * tokens * shape.hidden / layout.tp  # each tensor-parallel rank sends its part
        parts.add("pipeline messages", program.send_s * waited_messages(layout) + _messages(machine, layout, nbytes))
        others = sum(busy) - busy[slowest]
        if layout.schedule == "zb-h1" and m >= layout.pp and not job.frozen:
            others *= 1 / 3  # (p − 1)(F + B − W) where the three are alike
        parts.add("pipeline bubble", others / layout.chunks)
    _add_data_parallel(job, layout, split, mean, parts)
    tokens = layout.batch * job.sequence
    seconds = {name: job.correction * value for name, value in parts.seconds.items()}
    return PredictedStep(
        seconds, tokens * shape.flops(job.sequence, frozen=job.frozen), job.peak_flops, tokens, layout.gpus,
        tuple(split),
    )  # fmt: skip


def _micro_batch(job: Job, layout: Layout) -> tuple[Parts, Parts]:
    """Returns the seconds of a micro-batch on a rank: through an average layer, and through the head.

    How ranks share states and how many micro-batches a step has changes nothing here, so it is remembered.
    """
    key = (
        "micro-batch", layout.tp, layout.cp, layout.ep, layout.etp, layout.pp > 1, layout.gpus, layout.micro_batch,
        layout.sequence_parallel, layout.recompute, layout.recomputed_modules, layout.context,
    )  # fmt: skip
    if key not in job.cache:
        mean = Parts()
        for kind, count in job.shape.layer_kinds:
            mean.add_all(layer_seconds(job, layout, kind), count / job.shape.layers)
        job.cache[key] = mean, head_seconds(job, layout)
    return job.cache[key]


def _offloaded(job: Job, layout: Layout, mean: Parts, layers: int) -> float:
    """Returns the seconds by which a micro-batch's offload of activations outlasts its layers."""
    tokens = layout.micro_batch * job.sequence / layout.cp
    nbytes = 2 * min(layout.offloaded_layers, layers) * tokens * kept_bytes(job, layout)
    return max(0.0, nbytes / hardware.host_bytes_per_s(job.machine.gpu) - layers * mean.total)


def waited_messages(layout: Layout) -> int:
    """Counts the messages between stages on the longest path of a step; each is received when it is needed, not before.

    Two for each micro-batch, an activation and a gradient, and as many to fill and to drain. With two stages both
    go at once, one to each side, and an 1F1B pipeline of more saves three where the middle meets its ends.
    """
    m, pp = layout.accumulation, layout.pp
    if layout.chunks > 1:
        return 2 * (m * layout.chunks + pp - 1)
    return m + 1 if pp == 2 else 2 * (m + pp - 1) - min(m + 1, 3)


def _messages(machine: Machine, layout: Layout, nbytes: float) -> float:
    """Returns the seconds of the messages between stages that are waited for.

    Stages of one host may be neighbours, and the next ones are on another. To fill and to drain, each step of the way
    is taken once in each direction; between, all wait for the slowest step.
    """
    stride = layout.tp * layout.cp * layout.dp
    leaving, steps = machine.crossings(layout.pp, stride), layout.pp - 1
    within, across = machine.send(nbytes, stride, False), machine.send(nbytes, stride, True)
    ends = 0 if layout.pp == 2 else 2 * steps
    both = leaving * across + (steps - leaving) * within
    return (waited_messages(layout) - ends) * (across if leaving else within) + ends * both / steps


def _add_data_parallel(job: Job, layout: Layout, split: list[int], mean: Parts, parts: Parts) -> None:
    """Adds to ``parts`` the traffic of ranks with the same parameters, and the update of what each rank owns."""
    machine, program = job.machine, job.program
    owned = max(
        (owned_trained_params(job, layout, split, index) for index in range(layout.pp)),
        key=lambda rank_params: rank_params.total,
    )
    n = layout.replicas
    if n > 1 and layout.sharding == "zero3":
        _add_fully_sharded(job, layout, split, mean, parts)
    elif n > 1:
        hidden_s = 0.0
        if layout.sharding == "none" or program.sharded_dp_overlap:  # behind the last micro-batch's backward pass
            overlapped_passes = program.dp_overlap * BACKWARD_PER_FORWARD
            hidden_s = overlapped_passes / (1 + BACKWARD_PER_FORWARD) * mean.total * split[0]
        reduce_s, gather_s = _exchange(job, layout, owned)
        across_groups_s = _over_groups(job, layout, owned)
        # stage 2 reduces gradients with each micro-batch
        earlier_reductions = layout.accumulation - 1 if layout.sharding == "zero2" else 0
        micro_batch_s = reduce_s + gather_s if program.regathers_parameters else reduce_s
        exposed = max(0.0, reduce_s + across_groups_s + gather_s - hidden_s)
        exposed += earlier_reductions * max(0.0, micro_batch_s - hidden_s)
        parts.add("data-parallel traffic", exposed)
    moved_bytes = owned.sharded(layout) * (2 * program.state_bytes + program.gradient_bytes)
    parts.add("optimizer", moved_bytes / machine.memory_bytes_per_s)


def _exchange(job: Job, layout: Layout, owned: Owned) -> tuple[float, float]:
    """Returns the seconds in which gradients are reduced, and in which updated parameters are gathered."""
    machine, program, n = job.machine, job.program, layout.replicas
    group = layout.shard_group or n
    reduce_s, gather_s = program.reduce_s * (n - 1).bit_length(), 0.0
    for params, ranks, stride in _groups(owned, group, layout):
        share = _share(job, ranks, stride)
        buckets = math.ceil(params / program.bucket_elements)
        reduce_s += buckets * program.bucket_host_s * machine.crossings(ranks, stride)
        if layout.sharding == "none":
            reduce_s += machine.all_reduce(program.gradient_bytes * params, ranks, stride) / share
        else:
            reduce_s += machine.gather(program.gradient_bytes * params, ranks, stride) / share
            gather_s += machine.gather(2 * params, ranks, stride) / share
    return reduce_s, gather_s


def _over_groups(job: Job, layout: Layout, owned: Owned) -> float:
    """Returns the seconds in which gradients are summed over groups that share states, once a step (HSDP).

    Zhao et al. 2023 (arXiv 2304.11277), 3.2.2.
    """
    if not 0 < layout.shard_group < layout.replicas:
        return 0.0
    seconds = 0.0
    in_groups, in_all = (_groups(owned, ranks, layout) for ranks in (layout.shard_group, layout.replicas))
    for (params, within, stride), (_, everywhere, _) in zip(in_groups, in_all, strict=True):
        groups, apart = everywhere // within, stride * within
        sent = job.machine.all_reduce(job.program.gradient_bytes * params / within, groups, apart)
        seconds += sent / _share(job, groups, apart)
    return seconds


def _groups(owned: Owned, n: int, layout: Layout) -> list[tuple[float, int, int]]:
    """Lists groups of ``n`` ranks with the same parameters: (parameters, ranks, stride); experts on every ``ep``-th."""
    dense = (owned.dense, n, layout.tp)
    return [dense] if not owned.experts else [dense, (owned.experts, layout.expert_copies(n), layout.expert_ranks)]


def _share(job: Job, n: int, stride: int) -> float:
    """Returns the share of the links' rate that an exchange of gradients reaches; ``ring_bytes_per_s`` limits it."""
    program = job.program
    if job.machine.inside(n, stride):
        return program.reduce_efficiency
    return min(program.reduce_efficiency, program.ring_bytes_per_s / job.machine.rate(n, stride))


def _add_fully_sharded(job: Job, layout: Layout, split: list[int], mean: Parts, parts: Parts) -> None:
    """Adds ZeRO-3's traffic: each micro-batch gathers a layer's parameters twice and scatters its gradients.

    It runs beside the layers' computation. With LoRA the gradients are the adapters' alone. Nothing hides the first
    layer's gathers, before either pass begins, nor its scatter, when both are over.
    """
    shape, machine, program = job.shape, job.machine, job.program
    group, stride = layout.shard_group or layout.replicas, layout.tp
    per_layer = owned_layer(shape, layout)
    trained = trained_layer(job, layout) if job.frozen else per_layer

    def seconds(times: float, layer: Owned) -> float:
        groups = _groups(layer, group, layout)
        return sum(machine.gather(times * params, ranks, apart) / _share(job, ranks, apart)
                   for params, ranks, apart in groups)  # fmt: skip

    layer_s = 2 * seconds(2, per_layer) + seconds(program.gradient_bytes, trained)
    exposed = max(layer_s, max(split) * (layer_s - program.dp_overlap * mean.total))
    embedding_params = shape.embedding_params / layout.tp
    ends_s = 2 * machine.gather(2 * embedding_params, group, stride)
    ends_s += 0.0 if job.frozen else machine.gather(program.gradient_bytes * embedding_params, group, stride)
    ends_s /= _share(job, group, stride)
    parts.add("data-parallel traffic", layout.accumulation * (exposed + ends_s))
    updated = Owned(max(split) * trained.dense, max(split) * trained.experts)
    parts.add("data-parallel traffic", _over_groups(job, layout, updated))
