"""Seconds of a micro-batch on one rank: a layer's products, attention, memory, launches and traffic, and the head's."""

from dataclasses import dataclass, field

from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.shape import COLUMNS, Product, Shape
from pardemo.planner.layouts.stacks import Stack

#: Where a step's time goes.
PARTS = (
    "layers as measured",
    "matrix multiplications",
    "attention",
    "memory bandwidth",
    "launching kernels",
    "tensor-parallel traffic",
    "context-parallel traffic",
    "expert-parallel traffic",
    "pipeline messages",
    "pipeline bubble",
    "data-parallel traffic",
    "optimizer",
)
BACKWARD_ATTENTION = 2.5  # of its forward: five products for two (arXiv 2307.08691, 3.1)
ROUTED_PASSES = 4  # that a routed token is read or written: out and back, on both sides
LOSS_BYTES = 16  # read and written for each logit in both passes: bf16 once, fp32 three times
HIDDEN_RING = 0.8  # of attention, beside which keys and values go round


@dataclass(frozen=True)
class Job:
    """What is trained, by which program, on which machine.

    Args:
        sequence: tokens of a sample. fused: FlashAttention; else attention's scores go through memory.
        fp8: whether its products are made in fp8, the rest in bf16; else all is bf16.
    """

    shape: Shape
    machine: Machine
    stack: Stack
    sequence: int = 4096
    fused: bool = True
    fp8: bool = False

    def __post_init__(self):
        if self.sequence < 1:
            raise ValueError(f"a sequence must have at least 1 token, not {self.sequence!r}")

    @property
    def small(self) -> float:
        """Rows, columns and depth that a product loses: as measured of its machine, else as the program's runs say."""
        return self.stack.small if self.machine.gpu.small is None else self.machine.gpu.small

    @property
    def rate(self) -> float:
        """How many times as quick as bf16's its products are."""
        return self.stack.fp8 if self.fp8 else 1.0


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


def product(job: Job, weights: Product, tp: int, tokens: float) -> float:
    """Seconds of ``tokens`` rows times one rank's share of the weights.

    Operations over the rate of large products, which each of the three sizes loses something of when it is small.
    """
    inputs, outputs = weights.on(tp)
    small = job.small
    full = 2 * tokens * inputs * outputs / (job.machine.matrix_flops * job.stack.products * job.rate)
    return full * (1 + small / tokens) * (1 + small / inputs) * (1 + small / outputs)


def layer(job: Job, layout: Layout, experts: bool) -> Parts:
    """Seconds of both passes of a micro-batch through one layer on one rank, with what is recomputed.

    ``experts`` says whether it is a layer with experts.
    """
    shape, machine, stack, parts = job.shape, job.machine, job.stack, Parts()
    tokens = layout.micro_batch * job.sequence / layout.cp
    full = layout.recompute == "full"
    passes = 4 if full else 3  # of a product: the backward pass makes two
    exchanges = 6 if full else 4  # two in each pass, and in the recomputed one
    width = shape.experts.shared if experts else shape.middle
    products = sum(product(job, weights, layout.tp, tokens) for weights in shape.attention)
    if width:
        products += sum(product(job, weights, layout.tp, tokens) for weights in shape.mlp(width))
    whole = stack.whole / (layout.tp if layout.sequence_parallel else 1)
    moved = 2 * tokens * shape.hidden * (whole + stack.cut / layout.tp)
    if experts:
        routed = tokens * shape.experts.chosen
        each = routed * layout.ep / shape.experts.count  # of one expert here, if all are chosen alike
        local_experts = shape.experts.count / layout.ep
        products += local_experts * sum(product(job, p, layout.tp, each) for p in shape.mlp(shape.experts.middle))
        moved += 2 * routed * shape.hidden * ROUTED_PASSES / layout.tp
        out = machine.all_to_all(2 * routed * shape.hidden / layout.tp, layout.ep, layout.tp)
        parts.add("expert-parallel traffic", exchanges * out)
    again = stack.selective_products if layout.recompute == "selective" else 0.0
    attention = _attention(job, layout)
    if stack.layer_s is None:
        parts.add("matrix multiplications", (passes + again) * products)
        parts.add("attention", attention)
        parts.add("memory bandwidth", (passes + again) * moved / machine.memory_bytes_per_s)
    else:
        parts.add("layers as measured", passes / 3 * stack.layer_s)
    if layout.tp > 1:
        once = machine.all_reduce(2 * tokens * shape.hidden, layout.tp)
        once += (stack.start - 1) * machine.latency(layout.tp)
        once += 0.0 if machine.inside(layout.tp) else stack.crossing_s
        parts.add("tensor-parallel traffic", exchanges * once * (1 - stack.hides_tensor))
    if layout.cp > 1:
        parts.add("context-parallel traffic", _context(job, layout, attention))
    if stack.layer_s is None:
        parts.add("launching kernels", max(0.0, _launching(job, layout) * passes / 3 - parts.total))
    return parts


def _attention(job: Job, layout: Layout) -> float:
    """Seconds of attention in both passes. Where it is not fused, the scores go through memory.

    Of a causal sequence cut over ``cp`` ranks, the last one has the most to do, unless the program gives each rank one
    piece from the front and one from the back.
    """
    shape, machine, length = job.shape, job.machine, job.sequence
    heads = shape.heads / layout.tp
    flops = 2 * layout.micro_batch * length / layout.cp * length * heads * (shape.head + shape.value)
    again = layout.recompute == "full" or (layout.recompute == "selective" and job.stack.selective_attention)
    if job.fused:
        even = job.stack.even_context or layout.context == "all-to-all"  # then each rank has the whole sequence
        uneven = 1.0 if even else 2 - 1 / layout.cp
        return (1 + BACKWARD_ATTENTION + again) * uneven * flops / 2 / (machine.attention_flops * job.stack.attention)
    scores = layout.micro_batch * length / layout.cp * length * heads * 2 * job.stack.scores
    return (3 + again) * (flops / machine.matrix_flops + scores / machine.memory_bytes_per_s)


def _context(job: Job, layout: Layout, attention: float) -> float:
    """Seconds of context-parallel traffic that attention does not hide.

    Keys and values go round the ring beside attention; in the backward pass their gradients go with them. A program
    that gathers them begins with the part that is there, too. With all-to-alls, queries, keys, values and attention's
    outputs go to all ranks in each pass, which nothing hides (Jacobs et al. 2023, arXiv 2309.14509, 3.2).
    """
    shape = job.shape
    if layout.context == "all-to-all":
        tokens = layout.micro_batch * job.sequence / layout.cp
        width = shape.heads * (shape.head + shape.value) + shape.groups * (shape.head + shape.value)
        passes = 3 if layout.recompute == "full" else 2
        sent = job.machine.all_to_all(2 * tokens * width / layout.tp, layout.cp, layout.tp)
        return passes * (sent + 3 * job.machine.latency(layout.cp, layout.tp))  # four of them
    nbytes = 2 * layout.micro_batch * job.sequence * shape.groups * (shape.head + shape.value) / layout.tp
    machine, ranks = job.machine, (layout.cp, layout.tp)
    if job.stack.gathers_context:
        forward, backward = machine.gather(nbytes, *ranks), 2 * machine.gather(nbytes, *ranks)
    else:
        forward, backward = machine.ring(nbytes, *ranks), machine.ring(2 * nbytes, *ranks)
    ring = backward + (2 if layout.recompute == "full" else 1) * forward
    return max((1 - HIDDEN_RING) * ring, ring - HIDDEN_RING * attention)


def _launching(job: Job, layout: Layout) -> float:
    """Host time to start a layer's kernels, nothing recomputed: a GPU that is quicker waits for it."""
    stack = job.stack
    each = stack.launch_s + stack.launch_rank_s * (layout.tp - 1)
    if layout.tp > 1 and layout.pp > 1 and layout.gpus > job.machine.host_gpus:
        each += stack.crossing_rank_s * layout.tp
    return each


def head(job: Job, layout: Layout) -> Parts:
    """Seconds of the logits and their loss, both passes."""
    shape, parts = job.shape, Parts()
    tokens = layout.micro_batch * job.sequence / layout.cp
    head = Product(shape.hidden, shape.vocabulary, COLUMNS)
    parts.add("matrix multiplications", 3 * product(job, head, layout.tp, tokens))
    parts.add("memory bandwidth", tokens * shape.vocabulary / layout.tp * LOSS_BYTES / job.machine.memory_bytes_per_s)
    return parts
