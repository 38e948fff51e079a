"""The problems of this chapter, and the way to each answer."""

import math

from pardemo.book.page.problems import problem
from pardemo.formulas import communication, tensor_parallel
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of


@problem("million")
def _weights_of_a_rank():
    """Llama 3 70B has h = 8192, a = 64 and kv = 8. How many million weights of W_q, W_k, W_v and W_o does one of t = 8
    ranks have in a block?"""
    weights = shape_of("llama3-70b").attention_params
    square = 8192**2
    return weights / 8 / 1e6, f"""W_q and W_o have h² = {square / 1e6:.1f} million weights each. W_k and W_v make kv of
        a heads, so they have an eighth of that each, {square / 8e6:.2f} million. Together these are {weights / 1e6:.0f}
        million, of which a rank has an eighth: {weights / 8e6:.1f} million."""  # fmt: skip


@problem("ranks")
def _largest_group():
    """Qwen2.5-7B has 28 query heads and kv = 4. You cut its attention on a node of eight GPUs, all of which work, in
    tensor-parallel groups of equal size, and each rank takes whole heads. How large can t be at most?"""
    shape = shape_of("qwen2.5-7b")
    fits = [t for t in (1, 2, 4, 8) if shape.heads % t == 0 and (shape.kv_heads % t == 0 or t % shape.kv_heads == 0)]
    most = max(fits)
    return most, f"""Groups of equal size on eight GPUs have 1, 2, 4 or 8 ranks. Eight ranks would get {shape.heads}/8 =
        {shape.heads / 8:g} query heads each, and a rank takes whole heads. Seven would divide the query heads, but
        neither the GPUs nor kv. With {shape.heads // most} query heads and {shape.kv_heads // most} head of keys and
        values on each rank, two replicas of {most} ranks fill the node: t is {most}."""  # fmt: skip


@problem("ms")
def _three_fs():
    """Eight A100s share Llama 3 8B (32 blocks, h = 4096), and NVLink reaches 240 GB/s each way. Somebody gives W_q, W_k
    and W_v an f each. Nothing hides; leave latency out. How many milliseconds longer does this make a micro-batch of
    8,192 tokens in bf16?"""
    shape, rate = shape_of("llama3-8b"), rates.inside(hardware.gpu("A100-80GB"))
    phi = tensor_parallel.phi(1, 8192, shape.hidden, 8, element_bytes=2)
    more = 2 * tensor_parallel.ALL_REDUCE * shape.layers * phi
    return 1e3 * more / rate, f"""φ is 7/8 of 2 · 8,192 · 4,096 bytes, {phi / 1e6:.1f} MB. Three f's all-reduce three
        gradients of X, each h wide even where keys and values are narrow: two all-reduces more, 4φ a block. In
        {shape.layers} blocks these are {more / 1e9:.2f} GB, which take {1e3 * more / rate:.1f} ms."""  # fmt: skip


@problem("%")
def _blocks_on_pcie():
    """Four RTX 4090s share a GPT block with h = 4096. Each reaches 132 TFLOP/s, and PCIe 25.6 GB/s each way. A
    micro-batch has one sample of 4,096 tokens in bf16. Nothing hides; leave latency out. By how many per cent do the
    all-reduces make the block longer, forward and backward?"""
    gpu, tokens, hidden = hardware.gpu("4090"), 4096, 4096
    computes = 3 * tensor_parallel.flops_forward(1, tokens, hidden) / 4 / rates.matrix(gpu)
    sent = tensor_parallel.block() * tensor_parallel.phi(1, tokens, hidden, 4, element_bytes=2)
    waits = sent / rates.inside(gpu)
    return 100 * waits / computes, f"""Forward, a block takes 24bsh² + 4bs²h operations, and backward twice that. A
        quarter of them all takes a GPU {1e3 * computes:.1f} ms. It sends 8φ = {sent / 1e6:.0f} MB, which takes
        {1e3 * waits:.2f} ms on so slow a link. So the all-reduces make the block {100 * waits / computes:.0f} %
        longer."""  # fmt: skip


@problem("tokens")
def _replicas_or_gathers():
    """Qwen2.5-3B has h = 2048, a = 16 and kv = 2. On t = 8 ranks you may give each rank a replica of a head and
    all-reduce its gradients once a step. Or ranks gather queries, keys and values, (1 + 2·kv/a)·φ forward and as much
    backward. All numbers have two bytes. With one micro-batch a step, from how many tokens on do replicas send less?"""
    shape, t = shape_of("qwen2.5-3b"), 8
    share = shape.kv_heads / shape.heads
    gathers = 2 * (1 + 2 * share) * tensor_parallel.phi(1, 1, shape.hidden, t, element_bytes=2)
    holders, numbers = t // shape.kv_heads, 2 * shape.hidden * shape.head_dim
    replicas = communication.ring_all_reduce(2 * numbers, holders).sent
    tokens = math.ceil(replicas / gathers)
    return tokens, f"""A replica has 2·h²/a = {numbers:,} weights of W_k and W_v, and {holders} ranks have the same one.
        The all-reduce of its gradients sends {replicas / 1e6:.2f} MB from each, however many tokens there are.
        Gathering sends {gathers:,.0f} bytes for each token. So replicas send less from {tokens} tokens
        on."""  # fmt: skip
