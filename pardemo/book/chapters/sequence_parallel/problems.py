"""The problems of this chapter, and the way to each answer."""

import math

from pardemo.book.page.problems import problem
from pardemo.formulas import memory, tensor_parallel
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of


def _llama_block() -> tuple[int, float]:
    """The s·b·h of one sample of 8,192 tokens in Llama 3 70B, and the bytes that a block keeps for each."""
    shape = shape_of("llama3-70b")
    return 8192 * shape.hidden, 12 + 4 * shape.kv_heads / shape.heads + 8 * shape.ffn_hidden / shape.hidden


@problem("GB")
def _a_block_of_today():
    """A block of Llama 3 70B has h = 8192, kv/a = 1/8 and an MLP that is 3.5·h wide. How many GB does it keep for one
    sample of 8,192 tokens, on one GPU and with FlashAttention?"""
    shape, (unit, each) = shape_of("llama3-70b"), _llama_block()
    return unit * each / 1e9, f"""Keys and values add 4·kv/a = {4 * shape.kv_heads / shape.heads:g}, and the MLP's four
        tensors 8 · 3.5 = {8 * shape.ffn_hidden / shape.hidden:g}. With the other 12 a block keeps {each:g} bytes / sbh.
        There are 8,192 · 8,192 numbers, so these are {unit * each / 1e9:.2f} GB."""  # fmt: skip


@problem("GB")
def _cut_along_the_sequence():
    """A block of Llama 3 70B (h = 8192) keeps 40.5 bytes / sbh, and tensor parallelism leaves 8 of them whole. With t =
    8, a GPU has 20 blocks and holds four micro-batches of 8,192 tokens. How many GB does sequence parallelism save on
    this GPU, if inputs are gathered again?"""
    unit, each = _llama_block()
    layers = 20 * 4  # of four micro-batches
    states = memory.model_states_bytes(20 * round(shape_of("llama3-70b").mean_layer[0]) // 8, 1, 0)
    alone, along = (layers * unit * kept / 1e9 for kept in (8 + (each - 8) / 8, each / 8))
    return alone - along, f"""Tensor parallelism alone keeps 8 + {each - 8:g}/8 bytes / sbh on each GPU. For 20 blocks
        and four micro-batches these are {alone:.1f} GB, too much beside {states / 1e9:.0f} GB of model states (16 bytes
        a parameter). Sequence parallelism cuts the 8 as well: {each:g}/8 bytes / sbh are {along:.1f} GB, which is
        {alone - along:.1f} GB less."""  # fmt: skip


@problem("%")
def _gathered_again():
    """Eight H100s share blocks with h = 8192 in bf16. Each reaches 635.6 TFLOP/s, and NVLink 360 GB/s each way. A
    block's weights take 24·h² operations forward for each token; leave scores and latency out. If nothing hides, by how
    many per cent does it make a block longer, forward and backward, to gather the inputs again?"""
    gpu, hidden = hardware.gpu("H100"), 8192
    matrices = tensor_parallel.flops_forward(1, 1, hidden) - tensor_parallel.flops_core(1, 1, hidden)
    computes = 3 * matrices / 8 / rates.matrix(gpu)
    sent = 2 * tensor_parallel.phi(1, 1, hidden, 8, element_bytes=2)
    travels = sent / rates.inside(gpu)
    return 100 * travels / computes, f"""For each token a block takes 3 · 24·h² operations, forward and backward, and an
        eighth of them takes a GPU {1e6 * computes:.3f} µs. The second gather saves two whole tensors in each block. Its
        2φ are {sent:,.0f} bytes, which take {1e9 * travels:.1f} ns, so the block gets {100 * travels / computes:.1f} %
        longer."""  # fmt: skip


@problem("tokens")
def _a_tenth_for_the_core():
    """With h = 8192, from how many tokens in a sample on does selective recomputation, which computes the attention
    core again, cost a tenth of a step's operations or more?"""
    hidden, share = 8192, 0.1
    core = tensor_parallel.flops_core(1, 1, hidden)  # for each token, times s
    matrices = tensor_parallel.flops_forward(1, 1, hidden) - core
    tokens = math.ceil(3 * share * matrices / (core * (1 - 3 * share)))
    return tokens, f"""Computing the core again is s/(18h + 3s) of a step. A tenth of a step is where s =
        {18 * share:g}·h + {3 * share:g}·s, which is s = {tokens / hidden:.3g}·h. With h = {hidden:,} that is s =
        {tokens:,} tokens."""  # fmt: skip


@problem("blocks")
def _blocks_in_full():
    """One GPU has 12 blocks of GPT-3 (h = 12,288), with t = 8, sequence parallelism and FlashAttention. It holds eight
    micro-batches of four samples of 2,048 tokens, and has 30 GB left for what the blocks keep. At least how many of the
    blocks have to be recomputed in full?"""
    batches, blocks, room = 8, 12, 30e9
    kept = batches * memory.block_activation_bytes(2048, 4, 12_288, 96, 8, True, "selective")
    least = batches * memory.block_activation_bytes(2048, 4, 12_288, 96, 8, True, "full")
    missing = blocks * kept - room
    needed = math.ceil(missing / (kept - least))
    return needed, f"""A block keeps 34/8 bytes / sbh, which for eight micro-batches is {kept / 1e9:.2f} GB, and
        {blocks} blocks keep {blocks * kept / 1e9:.1f} GB: {missing / 1e9:.1f} GB too much. Recomputed in full, a block
        keeps 2/8 bytes / sbh and frees {(kept - least) / 1e9:.2f} GB, for a third more operations in this block.
        {missing / 1e9:.1f} / {(kept - least) / 1e9:.2f} is {missing / (kept - least):.1f}, so it takes {needed}
        blocks."""  # fmt: skip
