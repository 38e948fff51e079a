"""The problems of this chapter, and the way to each answer."""

import math

from pardemo.book.page.problems import problem
from pardemo.formulas import communication, tensor_parallel
from pardemo.planner.layouts.configurations import shape_of


@problem("rows")
def _rows_of_padding():
    """Llama 3 has a vocabulary of 128,256 words. Megatron pads the table to a multiple of 128·t. With t = 8, how many
    rows stand for no word?"""
    words, step = shape_of("llama3-8b").vocabulary, 128 * 8
    rows = math.ceil(words / step) * step
    return rows - words, f"""128·t is {step:,}, and {words:,} words are {words / step:g} times that. So the table gets
        {rows // step} · {step:,} = {rows:,} rows, and {rows - words} of them stand for no word."""  # fmt: skip


@problem("GB")
def _logits_not_held():
    """A micro-batch has 8,192 tokens, V is 128,256, and t is 8. The loss with gathered logits holds the fp32 logits of
    all words, and keeps softmax's result. The cut loss holds a rank's own logits, and keeps exp of them. How many GB
    less does the cut loss hold on each rank?"""
    logits = 4 * 8192 * shape_of("llama3-8b").vocabulary
    gathered, cut = 2 * logits, 2 * logits / 8
    return (gathered - cut) / 1e9, f"""The logits of all words are 4 · 8,192 · 128,256 bytes = {logits / 1e9:.2f} GB,
        and with softmax's result {gathered / 1e9:.2f} GB. The cut loss holds an eighth of the logits and as many
        numbers of exp, {cut / 1e9:.2f} GB. It saves {(gathered - cut) / 1e9:.2f} GB on each rank."""  # fmt: skip


@problem("%")
def _share_of_traffic():
    """Llama 3.2 1B has l = 16 layers and h = 2048, t is 8, and a micro-batch has 8,192 tokens. Activations have two
    bytes a number, and the loss all-reduces numbers in fp32. What the cut vocabulary sends forward and backward is how
    many per cent of what the blocks send?"""
    shape, t, tokens = shape_of("llama3.2-1b"), 8, 8192
    phi = tensor_parallel.phi(1, tokens, shape.hidden, t, element_bytes=2)
    blocks = shape.layers * tensor_parallel.block() * phi
    ends = 2 * tensor_parallel.ALL_REDUCE * phi
    loss = communication.ring_all_reduce(4 * tensor_parallel.loss_elements(tokens), t).sent
    return 100 * (ends + loss) / blocks, f"""Embedding and head all-reduce an activation each, 4φ = {ends / 1e6:.0f} MB.
        The loss sends 2 · 7/8 of three fp32 numbers a token, {loss / 1e6:.2f} MB, next to nothing. The {shape.layers}
        blocks send 8φ each, {blocks / 1e9:.2f} GB. So the cut vocabulary sends {100 * (ends + loss) / blocks:.2f} % of
        that on top."""  # fmt: skip


@problem("tokens")
def _tokens_at_a_time():
    """You train Llama 3 8B (V = 128,256) with ZeRO, so t is 1, and compute logits and loss for a part of the tokens at
    a time. Logits and their gradient are fp32, and may take 1 GB together. How many tokens can a part have at most?"""
    each = 2 * 4 * shape_of("llama3-8b").vocabulary
    most = int(1e9 // each)
    return most, f"""A token has V logits of 4 bytes, and as many numbers in their gradient: {each / 1e6:.3f} MB. A
        sample of 8,192 tokens would take {8192 * each / 1e9:.1f} GB at once. If all parts use the same room one after
        the other, 1 GB is enough for parts of {most} tokens."""  # fmt: skip


@problem("%")
def _head_left_whole():
    """The blocks of Llama 3 8B multiply a token with 6.98 billion weights, its output head with 0.525 billion. Eight
    ranks cut the blocks, and each has the whole head. How many per cent more does a rank multiply than if the head were
    cut, too?"""
    shape, t = shape_of("llama3-8b"), 8
    block = shape.attention_params + sum(matrix.params for matrix in shape.mlp_matmuls(shape.ffn_hidden))
    blocks, head = shape.layers * block / t, shape.head_params
    longer = (blocks + head) / (blocks + head / t) - 1
    return 100 * longer, f"""A rank multiplies each token with an eighth of the blocks, {blocks / 1e9:.3f} billion
        weights. The head has {head / 1e9:.3f} billion, and an eighth of it {head / t / 1e9:.3f} billion. So a rank does
        {(blocks + head) / 1e9:.3f} in place of {(blocks + head / t) / 1e9:.3f} billion multiplications a token,
        {100 * longer:.0f} % more."""  # fmt: skip
