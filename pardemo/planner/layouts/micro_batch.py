"""Predicts a micro-batch's seconds on a rank: a layer's matrix products, attention, memory, traffic; the head."""

from dataclasses import dataclass, field

from pardemo.planner.layouts import per_rank
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.recomputed import recomputed
from pardemo.planner.layouts.shape import COLUMNS, Layer, Matmul

#: Where a step's time goes.
PARTS = (
    "layers as measured", "matrix multiplications", "attention", "memory bandwidth", "launching kernels",
    "tensor-parallel traffic", "context-parallel traffic", "expert-parallel traffic", "pipeline messages",
    "pipeline bubble", "data-parallel traffic", "offload", "optimizer",
)  # fmt: skip
MOST_OF_ALONE = 1.05  # of what matrix multiplications reach alone, as measured with one release of cuBLAS
BACKWARD_ATTENTION = 2.5  # of its forward: five matrix multiplications for two (arXiv 2307.08691, 3.1)
LOSS_BYTES = 16  # read and written for each logit in both passes: bf16 once, fp32 three times
#: Times of a forward pass that its backward pass takes (two products for each one), and its share of both.
BACKWARD_PER_FORWARD = 2
BACKWARD_SHARE = BACKWARD_PER_FORWARD / (1 + BACKWARD_PER_FORWARD)
HIDDEN_RING_SHARE = 0.8  # of attention, beside which keys and values go round


@dataclass
class Parts:
    """Seconds by what takes them."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """Adds ``seconds`` to one part."""
        if seconds:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def add_all(self, parts: "Parts", times: float = 1.0) -> None:
        """Adds all parts of ``other``, ``times`` times."""
        for name, seconds in parts.seconds.items():
            self.add(name, seconds * times)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def matmul_seconds(job: Job, matmul: Matmul, tp: int, tokens: float, in_bf16: bool = False) -> float:
    """Returns the seconds of ``tokens`` rows times one rank's part of a matrix.

    Operations over the rate of large ones; each of the three sizes adds its ``tile_loss``. ``in_bf16``: whatever the
    job's precision is.
    """
    inputs, outputs = matmul.on_rank(tp)
    tile_loss, speedup = job.tile_loss, 1.0 if in_bf16 else job.matmul_speedup
    gpu = job.machine.gpu
    most_flops = gpu.reachable * (1.0 if gpu.measured else MOST_OF_ALONE)
    reached_flops = min(job.machine.matrix_flops * job.program.matmul_efficiency, most_flops)
    full_tile_s = 2 * tokens * inputs * outputs / (reached_flops * speedup)
    return full_tile_s * (1 + tile_loss / tokens) * (1 + tile_loss / inputs) * (1 + tile_loss / outputs)


def layer_seconds(job: Job, layout: Layout, kind: Layer | None = None) -> Parts:
    """Returns the seconds of both passes of a micro-batch through one layer on one rank, with what is recomputed.

    ``kind``: by default the model's first.
    """
    shape, machine, program, parts = job.shape, job.machine, job.program, Parts()
    kind = kind or shape.layer_kinds[0][0]
    tokens = layout.micro_batch * job.sequence / layout.cp
    recomputes_all = layout.recompute == "full"
    passes = 4 if recomputes_all else 3  # the backward pass multiplies twice, or once for inputs alone
    blocks = bool(kind.mixer) + bool(kind.mlp)
    exchanges = (3 if recomputes_all else 2) * blocks  # one of each in each pass, and in the recomputed one
    selects_itself = layout.recompute == "selective" and not layout.recomputed_modules
    selective_share = program.selective_matmul_share if selects_itself else 0.0
    recomputed_modules = recomputed(shape, layout.recomputed_modules, kind)
    exchanges += recomputed_modules.blocks
    matmuls = shape.matmuls(kind)
    matmul_s = sum(matmul_seconds(job, matmul, layout.tp, tokens) for matmul in matmuls)
    uncut_passes = program.uncut_passes / (layout.tp if layout.sequence_parallel else 1)
    all_passes = uncut_passes + program.cut_passes / layout.tp
    moved_bytes = tokens * shape.hidden * all_passes * blocks  # two blocks, of 2 bytes
    streams = shape.residual_streams - 1
    moved_bytes += 6 * tokens * shape.hidden * streams * blocks  # read twice, written once, in 2 bytes
    moved_bytes += tokens * job.cast_bytes * sum(sum(matmul.on_rank(layout.tp)) for matmul in matmuls)
    recomputed_s = sum(matmul_seconds(job, matmul, layout.tp, tokens) for matmul in recomputed_modules.matmuls)
    recomputed_bytes = tokens * (
        recomputed_modules.blocks * shape.hidden * all_passes + 2 * recomputed_modules.elements / layout.tp
    )
    if job.frozen and program.adapter_passes:
        moved_bytes += program.adapter_passes * tokens * per_rank.adapters_moved_bytes(job, layout)
    attention_s = 0.0
    if kind.mixer == "attention":
        attention_s = _attention(job, layout, kind)
    elif kind.mixer == "linear" and shape.linear_mixer:
        moved_bytes += 2 * tokens * shape.linear_mixer.inner_dim / layout.tp * program.mixer_passes
        scan = tokens * shape.linear_mixer.scan_flops / layout.tp
        reached = machine.attention_flops * program.attention_efficiency
        attention_s = (1 + BACKWARD_ATTENTION + recomputes_all) * scan / reached
    launch_s = _launching(job, layout) * blocks / 2
    if kind.mlp == "experts":
        costs = expert_costs(job, layout)
        matmul_s += costs.matmul_s
        moved_bytes += costs.moved_bytes
        recomputes_experts = "moe" in layout.recomputed_modules
        recomputed_s += recomputes_experts * costs.matmul_s
        recomputed_bytes += recomputes_experts * costs.moved_bytes
        launch_s += costs.launch_s * (4 / 3 if recomputes_experts else 1)
        all_to_alls = 6 if recomputes_all or recomputes_experts else 4  # there and back, in each pass
        parts.add("expert-parallel traffic", all_to_alls * costs.exchange_s)
    if program.layer_s is None:
        parts.add("matrix multiplications", (passes + selective_share - job.frozen) * matmul_s + recomputed_s)
        parts.add("attention", attention_s)
        moved_bytes = (passes + selective_share) * moved_bytes + recomputed_bytes
        parts.add("memory bandwidth", moved_bytes / machine.memory_bytes_per_s)
    else:
        parts.add("layers as measured", passes / 3 * program.layer_s)
    if layout.tp > 1:
        exchange_s = machine.all_reduce(2 * tokens * shape.hidden, layout.tp)
        exchange_s += (program.exchange_latency - 1) * machine.latency(layout.tp)
        exchange_s += 0.0 if machine.inside(layout.tp) else program.exchange_across_hosts_s
        parts.add("tensor-parallel traffic", exchanges * exchange_s * (1 - program.tp_overlap))
    if layout.cp > 1 and kind.mixer == "attention":
        parts.add("context-parallel traffic", _context(job, layout, kind, attention_s))
    if program.layer_s is None:
        parts.add("launching kernels", max(0.0, launch_s * passes / 3 - parts.total))
    return parts


@dataclass(frozen=True)
class ExpertCosts:
    """Costs of a rank's experts of one layer in one pass."""

    matmul_s: float
    moved_bytes: float  # through memory, of tokens that are sorted, activated and joined
    exchange_s: float  # of one all-to-all
    launch_s: float  # host time, for both passes


def expert_costs(job: Job, layout: Layout) -> ExpertCosts:
    """Computes what a rank does with the tokens that are sent to its experts, and the exchange that brings them.

    The tokens are those of ``ep`` × ``etp`` ranks, each of which has a tensor-parallel share of its own (sequence
    parallel), and each goes to ``top_k`` experts.
    """
    shape, machine, program, experts = job.shape, job.machine, job.program, job.shape.experts
    if experts is None:
        raise ValueError(f"{shape.name or 'this model'} has no experts")
    tokens = layout.micro_batch * job.sequence / layout.cp / layout.tp
    sent_rows = tokens * experts.top_k  # rows that a rank sends, and as many that it gets, if all are chosen alike
    rows = sent_rows * layout.etp * job.imbalance
    experts_here = experts.count / layout.ep
    matmuls, width = shape.expert_matmuls, experts.latent_dim or shape.hidden
    matmul_s = experts_here * sum(matmul_seconds(job, matmul, layout.etp, rows / experts_here) for matmul in matmuls)
    fused = job.dispatcher == "fused"
    moved_bytes = 2 * width * rows * (program.fused_routed_passes if fused else program.routed_passes)
    moved_bytes *= 1 - job.overlapped * program.routed_overlap
    activation = 3 if shape.gated else 2  # numbers that it reads and writes
    moved_bytes += 2 * rows * experts.ffn_hidden / layout.etp * activation
    moved_bytes += rows * job.cast_bytes * sum(sum(matmul.on_rank(layout.etp)) for matmul in matmuls)
    nbytes = 2 * sent_rows * width
    if fused:
        exchange_s = job.imbalance * machine.dispatch(nbytes, layout.ep, layout.etp, experts.top_k)
    else:
        exchange_s = job.imbalance * machine.all_to_all(nbytes, layout.ep, layout.etp)
    exchange_s *= 1 - job.overlapped * program.ep_overlap
    if layout.etp > 1:
        exchange_s += machine.gather(2 * rows * width, layout.etp)
    if experts.bias:
        moved_bytes += 2 * rows * sum(matmul.on_rank(layout.etp)[1] for matmul in matmuls) * program.expert_bias_passes
    host_waits = job.dropless and not (fused and job.started_by_graphs)
    launch_s = program.expert_launch_s if host_waits else 0.0
    return ExpertCosts(matmul_s, moved_bytes, exchange_s, launch_s)


def _attention(job: Job, layout: Layout, kind: Layer) -> float:
    """Returns the seconds of attention in both passes. Where it is not fused, the scores go through memory.

    Of a causal sequence cut over ``cp`` ranks, the last one has the most to do, unless the program gives each rank one
    piece from the front and one from the back.
    """
    shape, machine, sequence = job.shape.with_heads_of(kind), job.machine, job.sequence
    heads = shape.heads / layout.tp
    flops = 2 * layout.micro_batch * sequence / layout.cp * sequence * heads * (shape.head_dim + shape.value_dim)
    modules = layout.recomputed_modules
    repeats_attention = "core_attn" in modules if modules else job.program.selective_attention
    recomputes = layout.recompute == "full" or (layout.recompute == "selective" and repeats_attention)
    if job.fused:
        flops *= shape.attended_tokens(kind, sequence) / sequence
        # with all-to-alls each rank has the whole sequence
        balanced = job.program.balanced_context or layout.context == "all-to-all"
        imbalance = 1.0 if balanced else 2 - 1 / layout.cp
        reached = machine.attention_flops * job.program.attention_efficiency
        return (1 + BACKWARD_ATTENTION + recomputes) * imbalance * flops / reached
    score_bytes = layout.micro_batch * sequence / layout.cp * sequence * heads * 2 * job.program.score_passes
    return (3 + recomputes) * (flops / machine.matrix_flops + score_bytes / machine.memory_bytes_per_s)


def _context(job: Job, layout: Layout, kind: Layer, attention_s: float) -> float:
    """Returns the seconds of context-parallel traffic that attention does not hide.

    Keys and values go round the ring beside attention; in the backward pass their gradients go with them. A program
    that gathers them begins with the part that is there, too. With all-to-alls, queries, keys, values and attention's
    outputs go to all ranks in each pass, which nothing hides (Jacobs et al. 2023, arXiv 2309.14509, 3.2).
    """
    shape = job.shape.with_heads_of(kind)
    if layout.context == "all-to-all":
        tokens = layout.micro_batch * job.sequence / layout.cp
        width = shape.heads * (shape.head_dim + shape.value_dim) + shape.kv_heads * (shape.head_dim + shape.value_dim)
        passes = 3 if layout.recompute == "full" else 2
        all_to_all_s = job.machine.all_to_all(2 * tokens * width / layout.tp, layout.cp, layout.tp)
        return passes * (all_to_all_s + 3 * job.machine.latency(layout.cp, layout.tp))  # four of them
    nbytes = 2 * layout.micro_batch * job.sequence * shape.kv_heads * (shape.head_dim + shape.value_dim) / layout.tp
    machine, ranks = job.machine, (layout.cp, layout.tp)
    if job.program.gathers_context:
        forward_s, backward_s = machine.gather(nbytes, *ranks), 2 * machine.gather(nbytes, *ranks)
    else:
        forward_s, backward_s = machine.ring(nbytes, *ranks), machine.ring(2 * nbytes, *ranks)
    exchange_s = backward_s + (2 if layout.recompute == "full" else 1) * forward_s
    return max((1 - HIDDEN_RING_SHARE) * exchange_s, exchange_s - HIDDEN_RING_SHARE * attention_s)


def _launching(job: Job, layout: Layout) -> float:
    """Returns the host time that starts a layer's kernels, nothing recomputed: a GPU that is quicker waits for it."""
    program = job.program
    if job.started_by_graphs:
        return 0.0
    launch_s = program.launch_s + program.launch_rank_s * (layout.tp - 1)
    if layout.tp > 1 and layout.pp > 1 and layout.gpus > job.machine.host_gpus:
        launch_s += program.launch_across_hosts_s * layout.tp
    return launch_s


def head_seconds(job: Job, layout: Layout) -> Parts:
    """Returns the seconds of the logits and their loss, both passes; and of multi-token prediction's layers."""
    shape, parts = job.shape, Parts()
    tokens = layout.micro_batch * job.sequence / layout.cp
    head_matmul = Matmul(shape.hidden, shape.vocabulary, COLUMNS)
    heads = 1 + shape.mtp_layers
    logits = tokens * shape.vocabulary / layout.tp
    passes = 3 if not job.frozen or job.tuning.embeddings else 2
    head_s = matmul_seconds(job, head_matmul, layout.tp, tokens, in_bf16=True)
    parts.add("matrix multiplications", heads * passes * head_s)
    parts.add("memory bandwidth", heads * logits * LOSS_BYTES / job.machine.memory_bytes_per_s)
    if shape.mtp_layers:
        parts.add_all(layer_seconds(job, layout, shape.mtp_layer_kind), shape.mtp_layers)
        mtp_projection_s = matmul_seconds(job, Matmul(2 * shape.hidden, shape.hidden, COLUMNS), layout.tp, tokens)
        parts.add("matrix multiplications", shape.mtp_layers * (3 - job.frozen) * mtp_projection_s)
    return parts
