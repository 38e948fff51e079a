"""The problems of this chapter, and the way to each answer."""

import math

from pardemo.book.page.problems import problem
from pardemo.formulas import communication, memory, tensor_parallel
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of


@problem("MB")
def _sent_by_one_mlp():
    """An MLP with h = 8192 is cut over t = 8 ranks and gets one sample of 4,096 tokens in bf16. How many MB does a rank
    send, forward and backward?"""
    phi = tensor_parallel.phi(1, 4096, 8192, 8, element_bytes=2)
    sent = tensor_parallel.half() * phi
    return sent / 1e6, f"""A is 2 · 4,096 · 8,192 bytes = {phi * 8 / 7 / 1e6:.1f} MB, and φ is 7/8 of it,
        {phi / 1e6:.1f} MB. One all-reduce forward and one backward are 2φ each: 4φ = {sent / 1e6:.0f}
        MB."""  # fmt: skip


@problem("GB")
def _eighty_of_them():
    """Llama 3 70B has 80 gated MLPs. In each, W_gate and W_up are [8192, 28,672], and W_down is [28,672, 8192]. A
    weight costs 16 bytes with its gradient and Adam's states. How many GB do the MLPs take on each of t = 8 GPUs?"""
    shape = shape_of("llama3-70b")
    weights = sum(matrix.params for matrix in shape.mlp_matmuls(shape.ffn_hidden))
    held = memory.model_states_bytes(shape.layers * weights // 8, 1, 0)
    return held / 1e9, f"""One MLP has 3 · 8,192 · 28,672 = {weights / 1e6:.0f} million weights, and a rank has an
        eighth of them, {weights / 8e6:.1f} million. Eight GPUs of 80 GB do not even hold the MLPs, so the model needs
        stages or ZeRO as well: with 16 bytes a weight, the {shape.layers} MLPs take {held / 1e9:.1f} GB on
        each."""  # fmt: skip


@problem("%")
def _forward_pass_with_g():
    """Eight A100s share an MLP with h = 4096 (W₁ is [h, 4h]) and 4,096 tokens in bf16. Each of them reaches F = 271.2
    TFLOP/s, and NVLink B = 240 GB/s each way. Leave latency out. By how many per cent does g's all-reduce make the
    forward pass longer?"""
    gpu = hardware.gpu("A100-80GB")
    matrices = tensor_parallel.flops_forward(1, 4096, 4096) - tensor_parallel.flops_core(1, 4096, 4096)
    computes = 2 / 3 * matrices / 8 / rates.matrix(gpu)  # a block's 24·b·s·h² are 16 in the MLP and 8 in attention
    sent = 2 * tensor_parallel.phi(1, 4096, 4096, 8, element_bytes=2)
    waits = sent / rates.inside(gpu)
    return 100 * waits / computes, f"""Two matrices of h · 4h weights and 4,096 tokens make 16·b·s·h² operations, of
        which a rank does an eighth in {1e3 * computes:.3f} ms. g sends 2φ = {sent / 1e6:.1f} MB, which takes
        {1e3 * waits:.3f} ms. The next layer needs the sum at once, so the pass takes {100 * waits / computes:.1f} %
        longer."""  # fmt: skip


@problem("tokens")
def _tokens_beside_latency():
    """Eight H100s share an MLP with h = 8192 in bf16. NVLink reaches 360 GB/s each way, and α is 2 µs. At how many
    tokens does g's ring all-reduce spend as long on α as on bytes?"""
    starting = 2e-6 * communication.all_reduce_steps("ring", 8)
    each = 2 * tensor_parallel.phi(1, 1, 8192, 8, element_bytes=2)
    seconds = each / rates.inside(hardware.gpu("H100"))
    tokens = round(starting / seconds)
    return tokens, f"""A ring over 8 ranks has 2(t−1) = {communication.all_reduce_steps('ring', 8)} messages one after
        the other, {1e6 * starting:g} µs together. For each token a rank sends 2φ = {each:,.0f} bytes, in
        {1e9 * seconds:.1f} ns. With few tokens the ranks mostly wait for α. Bytes take as long at {1e6 * starting:g} µs
        / {1e9 * seconds:.1f} ns = {tokens} tokens."""  # fmt: skip


@problem("features")
def _width_that_hides():
    """Eight H100s share an MLP in bf16, with W₁ [h, 4h]. Each reaches F = 635.6 TFLOP/s, and NVLink B = 360 GB/s each
    way. Leave latency out. From which h on does f's all-reduce hide whole behind the gradient of W₁?"""
    gpu = hardware.gpu("H100")
    sent = 2 * tensor_parallel.phi(1, 1, 1, 8, element_bytes=2)  # bytes for each token, times h
    flops = (tensor_parallel.flops_forward(1, 1, 1) - tensor_parallel.flops_core(1, 1, 1)) / 3 / 8  # times h²
    width = math.ceil(sent / rates.inside(gpu) / (flops / rates.matrix(gpu)))
    return width, f"""For each token f's all-reduce sends 2φ = {sent:g}·h bytes, and the gradient of W₁, which has 4h²
        weights, takes a rank 8h²/8 operations. Both grow with the tokens, so these cancel, and only the multiplication
        grows with h². It is long enough where h/F is {sent:g}/B or more: from h = {width:,} on."""  # fmt: skip
