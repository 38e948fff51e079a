"""The problems of this chapter, and the way to each answer."""

import math

from pardemo.book.page.problems import problem
from pardemo.formulas import memory, tensor_parallel
from pardemo.planner import hardware, rates


@problem("GB")
def _all_multiplications_kept():
    """32 layers with h = 4096 keep 16 A each, for one sample of 8,192 tokens in bf16 without dropout. How many GB less
    do they keep under a policy that keeps each block's input and the results of attention and of all linear layers?"""
    each = 2 * memory.activation_checkpoints(4096, 1, 8192, 1)
    layers = 2 * memory.activation_checkpoints(4096, 1, 8192, 32)
    return 5 * layers / 1e9, f"""A is 2 · 8,192 · 4,096 bytes = {each / 1e6:.1f} MB. The policy keeps the results of the
        linear layers (9 A), of attention (1 A) and the input (1 A). The other 5 of 16 A are made again, without a
        matrix multiplication. In 32 layers these are {5 * layers / 1e9:.1f} GB."""  # fmt: skip


@problem("samples")
def _samples_with_checkpoints():
    """A model has 80 layers with h = 8192, a sample has 8,192 tokens, and 60 GB are left for activations. A block keeps
    34·b·s·h bytes, a checkpoint 2·b·s·h. Count the block that is just being run again, too. With a checkpoint of every
    block, how many samples can a micro-batch have?"""
    layers, room = 80, 60e9
    kept = memory.block_activation_bytes(8192, 1, 8192, 64, recompute="selective")
    checkpoint = memory.block_activation_bytes(8192, 1, 8192, 64, recompute="full")
    each = layers * checkpoint + kept
    most = int(room // each)
    return most, f"""Without checkpointing a single sample would keep 80 · 34·s·h = {layers * kept / 1e9:.0f} GB. A
        checkpoint is A = {checkpoint / 1e6:.0f} MB, so 80 of them are {layers * checkpoint / 1e9:.1f} GB, and the block
        that is just at work has {kept / 1e9:.1f} GB. Both grow with b: {room / 1e9:g} / {each / 1e9:.1f} is
        {room / each:.2f}, so b is {most}."""  # fmt: skip


@problem("%")
def _bargain_for_long_samples():
    """A model has h = 4096 and s = 32,768. You keep each block's input and attention's result. PyTorch's checkpoint
    stops early and spares the MLP's last multiplication, and fused attention takes 2.5 times its forward pass backward.
    How many per cent does this recomputation add to a step's matrix operations?"""
    hidden, sequence = 4096, 32_768
    core = tensor_parallel.flops_core(1, sequence, hidden)
    linear = tensor_parallel.flops_forward(1, sequence, hidden) - core
    step = 3 * linear + 3.5 * core
    again = linear * 2 / 3  # all but the MLP's last multiplication, which is 8 of the block's 24·b·s·h²
    return 100 * again / step, f"""Here s is {sequence // hidden}·h, so in units of b·s·h² linear layers take 24 forward
        and 48 backward, and attention {24 * core / linear:g} and {60 * core / linear:g}: {24 * step / linear:g} in all.
        With the input alone the default makes {24 * again / linear:g} + {24 * core / linear:g} again,
        {100 * (again + core) / step:.1f} %. For 1 A more attention's {24 * core / linear:g} are spared, and
        {24 * again / linear:g} are left: {100 * again / step:.1f} %."""  # fmt: skip


@problem("tokens")
def _samples_long_enough():
    """A model with h = 5120 runs on A100s that reach 271 TFLOP/s, and copies over PCIe 4 reach 25.6 GB/s each way. A
    block keeps 34·b·s·h bytes. From how many tokens in a sample on can all activations go to the host for no time?"""
    gpu = hardware.gpu("A100-80GB")
    hidden, rate = 5120, rates.matrix(gpu) / hardware.host_bytes_per_s(gpu)
    kept = memory.block_activation_bytes(1, 1, 1, 1, recompute="selective")
    threshold = kept / 24 * rate
    tokens = math.ceil(6 * (threshold - hidden))
    return tokens, f"""F/B is {rate:,.0f} operations a byte, so h + s/6 has to be {kept:g}/24 · F/B = {threshold:,.0f}
        or more. The width gives {hidden:,} of that, and s/6 the other {threshold - hidden:,.0f}. So s is 6 times that,
        {tokens:,} tokens."""  # fmt: skip


@problem("tokens")
def _tokens_for_adam_on_the_host():
    """Adam's states are on the host of eight A100s. Each GPU reaches 271 TFLOP/s and has its own link of 25.6 GB/s
    each way. For each parameter 4 bytes cross a link, and 30 go through the host's memory, which carries 410 GB/s. How
    many tokens must a step have, so that it gets no more than a tenth longer?"""
    gpu, host = hardware.gpu("A100-80GB"), 410e9
    flops, link = 8 * rates.matrix(gpu), 8 * hardware.host_bytes_per_s(gpu)
    per_token = flops / 6
    travels, updates = 4 / link * per_token, 30 / host * per_token
    tokens = math.ceil((travels + updates) / 0.1)
    return tokens, f"""A step waits as long as {travels + updates:,.0f} tokens compute: {travels:,.0f} for the 4 bytes a
        parameter that cross the links, and {updates:,.0f} for the CPU's 30 bytes. The model's size cancels. If that is
        to be a tenth of the computation, a step needs ten times as many tokens, {tokens:,}."""  # fmt: skip
