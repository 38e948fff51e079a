"""Predicts a micro-batch's seconds on a rank: a layer's products, attention, memory, launches, traffic; the head's."""

from dataclasses import dataclass, field

from pardemo.planner.layouts import per_rank
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.shape import COLUMNS, Layer, Matmul, recomputed

#: Where a step's time goes.
PARTS = (
    "layers as measured", "matrix multiplications", "attention", "memory bandwidth", "launching kernels",
    "tensor-parallel traffic", "context-parallel traffic", "expert-parallel traffic", "pipeline messages",
    "pipeline bubble", "data-parallel traffic", "offload", "optimizer",
)  # fmt: skip
MOST_OF_ALONE = 1.05  # of what products reach alone, which was measured with one release of their library
BACKWARD_ATTENTION = 2.5  # of its forward: five products for two (arXiv 2307.08691, 3.1)
LOSS_BYTES = 16  # read and written for each logit in both passes: bf16 once, fp32 three times
HIDDEN_RING = 0.8  # of attention, beside which keys and values go round


@dataclass
class Parts:
    """Seconds by what takes them."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """Adds ``seconds`` to one part."""
        if seconds:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def more(self, other: "Parts", times: float = 1.0) -> None:
        """Adds all parts of ``other``, ``times`` times."""
        for name, seconds in other.seconds.items():
            self.add(name, seconds * times)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def product(job: Job, weights: Matmul, tp: int, tokens: float, whole: bool = False) -> float:
    """Seconds of ``tokens`` rows times one rank's share of the weights; ``whole``: in bf16, whatever the job's is.

    Operations over the rate of large products, which each of the three sizes loses something of when it is small.
    """
    inputs, outputs = weights.on_rank(tp)
    small, rate = job.tile_loss, 1.0 if whole else job.matmul_speedup
    gpu = job.machine.gpu
    most = gpu.reachable * (1.0 if gpu.measured else MOST_OF_ALONE)
    reached = min(job.machine.matrix_flops * job.program.matmul_efficiency, most)
    full = 2 * tokens * inputs * outputs / (reached * rate)
    return full * (1 + small / tokens) * (1 + small / inputs) * (1 + small / outputs)


def layer(job: Job, layout: Layout, kind: Layer | None = None) -> Parts:
    """Seconds of both passes of a micro-batch through one layer on one rank, with what is recomputed.

    ``kind``: by default the model's first.
    """
    shape, machine, program, parts = job.shape, job.machine, job.program, Parts()
    kind = kind or shape.layer_kinds[0][0]
    tokens = layout.micro_batch * job.sequence / layout.cp
    full = layout.recompute == "full"
    passes = 4 if full else 3  # of a product: the backward pass makes two, or one for inputs alone
    blocks = bool(kind.mixer) + bool(kind.mlp)
    exchanges = (3 if full else 2) * blocks  # one of each in each pass, and in the recomputed one
    again = program.selective_matmul_share if layout.recompute == "selective" and not layout.modules else 0.0
    modules = recomputed(shape, layout.modules, kind)
    exchanges += modules.blocks
    weights = shape.matmuls(kind)
    products = sum(product(job, each, layout.tp, tokens) for each in weights)
    uncut = program.uncut_passes / (layout.tp if layout.sequence_parallel else 1)
    moved = tokens * shape.hidden * (uncut + program.cut_passes / layout.tp) * blocks  # two blocks, of 2 bytes
    moved += 6 * tokens * shape.hidden * (shape.residual_streams - 1) * blocks  # read twice, written once, in 2 bytes
    moved += tokens * job.cast_bytes * sum(sum(each.on_rank(layout.tp)) for each in weights)
    more = sum(product(job, each, layout.tp, tokens) for each in modules.matmuls)
    more_moved = tokens * (
        modules.blocks * shape.hidden * (uncut + program.cut_passes / layout.tp) + 2 * modules.elements / layout.tp
    )
    if job.frozen and program.adapter_passes:
        moved += program.adapter_passes * tokens * per_rank.adapters_moved_bytes(job, layout)
    attention = 0.0
    if kind.mixer == "attention":
        attention = _attention(job, layout, kind)
    elif kind.mixer == "linear" and shape.linear_mixer:
        moved += 2 * tokens * shape.linear_mixer.inner_dim / layout.tp * program.mixer_passes
        scan = tokens * shape.linear_mixer.scan_flops / layout.tp
        attention = (1 + BACKWARD_ATTENTION + full) * scan / (machine.attention_flops * program.attention_efficiency)
    launches = _launching(job, layout) * blocks / 2
    if kind.mlp == "experts":
        routed = experts(job, layout)
        products += routed.products
        moved += routed.moved
        whole_again = "moe" in layout.modules
        more += whole_again * routed.products
        more_moved += whole_again * routed.moved
        launches += routed.launches * (4 / 3 if whole_again else 1)
        times = 6 if full or whole_again else 4  # there and back, in each pass
        parts.add("expert-parallel traffic", times * routed.exchange)
    if program.layer_s is None:
        parts.add("matrix multiplications", (passes + again - job.frozen) * products + more)
        parts.add("attention", attention)
        parts.add("memory bandwidth", ((passes + again) * moved + more_moved) / machine.memory_bytes_per_s)
    else:
        parts.add("layers as measured", passes / 3 * program.layer_s)
    if layout.tp > 1:
        once = machine.all_reduce(2 * tokens * shape.hidden, layout.tp)
        once += (program.exchange_latency - 1) * machine.latency(layout.tp)
        once += 0.0 if machine.inside(layout.tp) else program.exchange_across_hosts_s
        parts.add("tensor-parallel traffic", exchanges * once * (1 - program.tp_overlap))
    if layout.cp > 1 and kind.mixer == "attention":
        parts.add("context-parallel traffic", _context(job, layout, kind, attention))
    if program.layer_s is None:
        parts.add("launching kernels", max(0.0, launches * passes / 3 - parts.total))
    return parts


@dataclass(frozen=True)
class Routed:
    """A rank's experts of one layer, of one pass.

    Args:
        products: seconds of their products. moved: bytes through memory of what is sorted, activated and joined.
        exchange: seconds of one all-to-all. launches: host time for both passes.
    """

    products: float
    moved: float
    exchange: float
    launches: float


def experts(job: Job, layout: Layout) -> Routed:
    """What a rank does with the tokens that are sent to its experts, and the exchange that brings them.

    The tokens are those of ``ep`` × ``etp`` ranks, each of which has a tensor-parallel share of its own (sequence
    parallel), and each goes to ``chosen`` experts.
    """
    shape, machine, program, of = job.shape, job.machine, job.program, job.shape.experts
    if of is None:
        raise ValueError(f"{shape.name or 'this model'} has no experts")
    tokens = layout.micro_batch * job.sequence / layout.cp / layout.tp
    sent = tokens * of.top_k  # rows that a rank sends, and as many that it gets, if all are chosen alike
    rows = sent * layout.etp * job.imbalance
    here = of.count / layout.ep
    weights, width = shape.expert_matmuls, of.latent_dim or shape.hidden
    products = here * sum(product(job, each, layout.etp, rows / here) for each in weights)
    fused = job.dispatcher == "fused"
    moved = 2 * width * rows * (program.fused_routed_passes if fused else program.routed_passes)
    moved *= 1 - job.overlapped * program.routed_overlap
    moved += 2 * rows * of.ffn_hidden / layout.etp * (3 if shape.gated else 2)  # the activation: read and written
    moved += rows * job.cast_bytes * sum(sum(each.on_rank(layout.etp)) for each in weights)
    nbytes = 2 * sent * width
    if fused:
        exchange = job.imbalance * machine.dispatch(nbytes, layout.ep, layout.etp, of.top_k)
    else:
        exchange = job.imbalance * machine.all_to_all(nbytes, layout.ep, layout.etp)
    exchange *= 1 - job.overlapped * program.ep_overlap
    if layout.etp > 1:
        exchange += machine.gather(2 * rows * width, layout.etp)
    if of.bias:
        moved += 2 * rows * sum(each.on_rank(layout.etp)[1] for each in weights) * program.expert_bias_passes
    host = job.dropless and not (fused and job.started_by_graphs)
    launches = program.expert_launch_s if host else 0.0
    return Routed(products, moved, exchange, launches)


def _attention(job: Job, layout: Layout, kind: Layer) -> float:
    """Seconds of attention in both passes. Where it is not fused, the scores go through memory.

    Of a causal sequence cut over ``cp`` ranks, the last one has the most to do, unless the program gives each rank one
    piece from the front and one from the back.
    """
    shape, machine, length = job.shape.with_heads_of(kind), job.machine, job.sequence
    heads = shape.heads / layout.tp
    flops = 2 * layout.micro_batch * length / layout.cp * length * heads * (shape.head_dim + shape.value_dim)
    chosen = "core_attn" in layout.modules if layout.modules else job.program.selective_attention
    again = layout.recompute == "full" or (layout.recompute == "selective" and chosen)
    if job.fused:
        flops *= shape.attended_tokens(kind, length) / length
        even = job.program.balanced_context or layout.context == "all-to-all"  # then each rank has the whole sequence
        uneven = 1.0 if even else 2 - 1 / layout.cp
        reached = machine.attention_flops * job.program.attention_efficiency
        return (1 + BACKWARD_ATTENTION + again) * uneven * flops / reached
    scores = layout.micro_batch * length / layout.cp * length * heads * 2 * job.program.score_passes
    return (3 + again) * (flops / machine.matrix_flops + scores / machine.memory_bytes_per_s)


def _context(job: Job, layout: Layout, kind: Layer, attention: float) -> float:
    """Seconds of context-parallel traffic that attention does not hide.

    Keys and values go round the ring beside attention; in the backward pass their gradients go with them. A program
    that gathers them begins with the part that is there, too. With all-to-alls, queries, keys, values and attention's
    outputs go to all ranks in each pass, which nothing hides (Jacobs et al. 2023, arXiv 2309.14509, 3.2).
    """
    shape = job.shape.with_heads_of(kind)
    if layout.context == "all-to-all":
        tokens = layout.micro_batch * job.sequence / layout.cp
        width = shape.heads * (shape.head_dim + shape.value_dim) + shape.kv_heads * (shape.head_dim + shape.value_dim)
        passes = 3 if layout.recompute == "full" else 2
        sent = job.machine.all_to_all(2 * tokens * width / layout.tp, layout.cp, layout.tp)
        return passes * (sent + 3 * job.machine.latency(layout.cp, layout.tp))  # four of them
    nbytes = 2 * layout.micro_batch * job.sequence * shape.kv_heads * (shape.head_dim + shape.value_dim) / layout.tp
    machine, ranks = job.machine, (layout.cp, layout.tp)
    if job.program.gathers_context:
        forward, backward = machine.gather(nbytes, *ranks), 2 * machine.gather(nbytes, *ranks)
    else:
        forward, backward = machine.ring(nbytes, *ranks), machine.ring(2 * nbytes, *ranks)
    ring = backward + (2 if layout.recompute == "full" else 1) * forward
    return max((1 - HIDDEN_RING) * ring, ring - HIDDEN_RING * attention)


def _launching(job: Job, layout: Layout) -> float:
    """Host time to start a layer's kernels, nothing recomputed: a GPU that is quicker waits for it."""
    program = job.program
    if job.started_by_graphs:
        return 0.0
    each = program.launch_s + program.launch_rank_s * (layout.tp - 1)
    if layout.tp > 1 and layout.pp > 1 and layout.gpus > job.machine.host_gpus:
        each += program.launch_across_hosts_s * layout.tp
    return each


def head(job: Job, layout: Layout) -> Parts:
    """Seconds of the logits and their loss, both passes; and of the layers that predict further tokens."""
    shape, parts = job.shape, Parts()
    tokens = layout.micro_batch * job.sequence / layout.cp
    head = Matmul(shape.hidden, shape.vocabulary, COLUMNS)
    times = 1 + shape.mtp_layers
    logits = tokens * shape.vocabulary / layout.tp
    passes = 3 if not job.frozen or job.tuning.embeddings else 2
    parts.add("matrix multiplications", times * passes * product(job, head, layout.tp, tokens, whole=True))
    parts.add("memory bandwidth", times * logits * LOSS_BYTES / job.machine.memory_bytes_per_s)
    if shape.mtp_layers:
        parts.more(layer(job, layout, shape.mtp_layer_kind), shape.mtp_layers)
        joined = product(job, Matmul(2 * shape.hidden, shape.hidden, COLUMNS), layout.tp, tokens)
        parts.add("matrix multiplications", shape.mtp_layers * (3 - job.frozen) * joined)
    return parts
