"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import communication, memory
from pardemo.planner import hardware
from pardemo.planner.layouts import procedure
from pardemo.planner.layouts.configurations import shape_of
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.programs import find_program

_BF16 = 2  # bytes
_LLAMA = shape_of("llama3-8b")
_H100 = hardware.gpu("H100")


@problem("samples")
def _batch_by_default():
    """You want steps of 64 samples. The script's loader has `batch_size=64`, the configuration says DDP on 8 GPUs, and
    `split_batches` is left at its default. How many samples does a step really take?"""
    layout = Layout(dp=8, micro_batch=64)
    return layout.batch, f"""By default each rank takes batches of the loader's size for itself. So the {layout.dp} GPUs
        take {layout.dp} · {layout.micro_batch} = {layout.batch} samples a step, and an epoch has an eighth of the steps
        that you planned. With `split_batches` on, each GPU takes 8 of the loader's 64."""  # fmt: skip


@problem("GB")
def _replica_in_each_node():
    """Llama 3 8B has 8.03 billion parameters. You train all of them with Adam in mixed precision on four nodes of eight
    H100s. How much more memory do the model states take on each GPU with HSDP, a replica in each node, than with FSDP2
    over all 32?"""
    inside, all_ranks = (memory.model_states_bytes(_LLAMA.params, n, 3) / 1e9 for n in (8, 32))
    more = inside - all_ranks
    return more, f"""All states are 16 bytes for each parameter, {16 * _LLAMA.params / 1e9:.1f} GB. FSDP2 divides them
        by 32, which makes {all_ranks:.2f} GB. HSDP divides them by the 8 GPUs of a node alone, which makes {inside:.2f}
        GB: {more:.2f} GB more. Both leave most of an H100 free, so here the network may decide."""  # fmt: skip


@problem("s")
def _cards_of_a_node():
    """The same model trains on two such nodes, each with a single network card of 100 Gbit/s. A step has one
    micro-batch, and everything is sent in bf16. How many seconds less do the bytes of a step take at the card with HSDP
    than with FSDP2?"""
    card = hardware.link("100")
    sharded = communication.zero_step(_LLAMA.params, 16, 3)
    replicas = 8 * communication.hierarchical_all_reduce(_BF16 * _LLAMA.params, 2, 8)[1]
    saved = (sharded - replicas) / card
    return saved, f"""Under FSDP2 a ring of 16 leaves each node once, so the card carries what a rank sends: 3Ψ numbers
        times 15/16, {sharded / 1e9:.1f} GB. Under HSDP each GPU's eighth of the gradients is all-reduced between two
        nodes, and the eight of them together send Ψ numbers, {replicas / 1e9:.1f} GB. The card takes
        {sharded / card:.2f} s and {replicas / card:.2f} s, so HSDP saves {saved:.2f} s."""  # fmt: skip


@problem("times")
def _by_the_rule():
    """Two nodes of eight H100s have a network card of 400 Gbit/s each, of which B = 24 GB/s is reached. A GPU reaches
    F = 636 TFLOP/s, a micro-batch has T = 8,192 tokens, and a step has m = 8 of them. Gathers and reductions hide
    behind the pass beside them. How many times as long as ZeRO-1's step is that of FSDP2 over all 16 GPUs?"""
    machine = Machine(_H100, 16, 8, hardware.link("400"))
    job = Job(_LLAMA, machine, find_program("megatron-core"), 8192)
    fsdp2, zero_1 = (
        1 + procedure.adds(job, Layout(dp=16, sharding=sharding, accumulation=8))["data parallel"]
        for sharding in ("zero3", "zero1")
    )
    r = procedure.rate(job) / procedure.link(job, 16) / 8192
    return fsdp2 / zero_1, f"""A gather takes κ = F/(B · T) = {r:.2f} times a forward pass. FSDP2 gathers beside each
        forward pass and waits (κ − 1)/3 of the multiplications' time for it; beside each backward pass, twice as long,
        it gathers and reduces and waits (2κ − 2)/3. It takes {fsdp2:.2f} times the multiplications. ZeRO-1 reduces
        beside the last backward pass and gathers after the update: (κ − 2)/(3m), not below 0, and κ/(3m), so it takes
        {zero_1:.2f} times. FSDP2's step is {fsdp2 / zero_1:.2f} times as long: over such a card take ZeRO-1 while it
        fits."""  # fmt: skip


@problem("billion parameters")
def _largest_offload():
    """A node of eight H100s (84.9 GB each, 8 % stay free) has 2 TB of memory, of which 70 % can hold gradients and
    Adam's states. The GPUs hold the weights in shards. How large a model can the node train by offload, if only what
    stays in memory counts?"""
    states = memory.ADAM
    in_gpus = 0.92 * 8 * _H100.memory_bytes / states.parameters
    on_host = 0.7 * 2e12 / (states.gradients + states.optimizer)
    largest = min(in_gpus, on_host) / 1e9
    return largest, f"""The GPUs would hold weights of 2 bytes for {in_gpus / 1e9:.0f} billion parameters. The node's
        memory holds gradients and Adam's states, {states.gradients + states.optimizer} bytes for each parameter, so
        {0.7 * 2e12 / 1e12:g} TB are enough for {on_host / 1e9:g} billion. The smaller of the two counts: {largest:g}
        billion. Above it you need more nodes, and not larger GPUs."""  # fmt: skip
