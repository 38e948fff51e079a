"""The problems of this chapter, and the way to each answer."""

import math

from pardemo.book.page.problems import problem
from pardemo.formulas import memory, pipeline
from pardemo.planner import hardware, rates


@problem("s")
def _seconds_of_a_step():
    """A pipeline has 8 stages and runs 32 micro-batches by 1F1B, with τF = 50 ms and τI + τW = 100 ms. How long does a
    step take, if messages take no time?"""
    seconds = pipeline.makespan(8, 32, 0.05, 0.1)
    waiting = pipeline.idle("one_f_one_b", 8, 32, 0.05, 0.1)
    return seconds, f"""A micro-batch keeps a stage busy for {waiting / 7:g} s, so 32 of them take {seconds - waiting:g}
        s. The bubble is as long as p−1 = 7 micro-batches, {waiting:g} s more. Together a step takes {seconds:g}
        s."""  # fmt: skip


@problem("micro-batches")
def _most_for_gpipe():
    """Each of four GPUs has a stage of 8 layers with h = 4,096. A layer keeps 34·h bytes for each token, a micro-batch
    has 4,096 tokens, and 60 GB of a GPU are left for activations. How many micro-batches can a step of GPipe have at
    most?"""
    room = 60e9
    each = 8 * memory.block_activation_bytes(4096, 1, 4096, 32, recompute="selective")
    most = int(room // each)
    of_1f1b = pipeline.in_flight("one_f_one_b", 0, 4, most)
    return most, f"""A micro-batch leaves 8 · 34 · 4,096 · 4,096 bytes = {each / 1e9:.2f} GB in a stage. 1F1B would hold
        {of_1f1b} of them on rank 0, {of_1f1b * each / 1e9:.1f} GB, however many there are. GPipe holds all m at one
        time: {room / 1e9:g} / {each / 1e9:.2f} = {room / each:.2f}, so it takes {most}."""  # fmt: skip


@problem("layers")
def _layers_of_a_chunk():
    """A model with h = 4,096 is cut over nodes of eight H100s, tensor parallel inside. Each GPU reaches 636 TFLOP/s and
    has a card that reaches 24 GB/s. A layer multiplies each token with 12·h² weights. How many layers does a chunk need
    at least, so that a message takes no longer than a tenth of its forward pass?"""
    reached, rate, h = rates.matrix(hardware.gpu("H100")), rates.between(hardware.link("infiniband-400g")), 4096
    layer, message = 24 * h**2 / reached, 2 * h / rate
    least = math.ceil(10 * message / layer)
    return least, f"""For each token a message has 2·h bytes and a layer 24·h² operations. An eighth of either is one
        GPU's, so the eights cancel: a message takes {1e9 * message:.0f} ns and a layer {1e9 * layer:.0f} ns. Ten times
        a message is {10 * message / layer:.1f} layers: take {least} layers. (The formula is
        F/(1.2·h·B).)"""  # fmt: skip


@problem("s")
def _card_with_chunks():
    """Each of four stages is a node, which sends an activation once, over a card that reaches 24 GB/s. A model with
    h = 8,192 runs by interleaved 1F1B with v = 4, in 32 micro-batches of 8,192 tokens in bf16. For how long does the
    card of a node in the middle send in a step?"""
    nbytes, rate = 2 * 8192 * 8192, rates.between(hardware.link("infiniband-400g"))
    plain, chunked = (pipeline.boundary_bytes(1, 4, 32, nbytes, chunks)[0] for chunks in (1, 4))
    return chunked / rate, f"""A is 2 · 8,192 · 8,192 bytes = {nbytes / 1e6:.0f} MB. With one chunk a node in the middle
        sends an activation onward and a gradient back for each micro-batch, {plain / 1e9:.2f} GB a step. With four
        chunks it has four times as many boundaries: {chunked / 1e9:.1f} GB, which take {chunked / rate:.3f}
        s."""  # fmt: skip


@problem("times")
def _twice_the_gpus():
    """64 GPUs are eight pipelines of 8 stages that run 1F1B, and the batch makes 8 micro-batches for each pipeline. You
    rent 64 GPUs more, make sixteen pipelines, and keep the batch and the size of a micro-batch. If nothing but work and
    bubbles takes time, how many times as fast is a step?"""
    few, many = pipeline.makespan(8, 8, 1 / 3, 2 / 3), pipeline.makespan(8, 4, 1 / 3, 2 / 3)
    idle = [100 * pipeline.bubble_of_total(8, m) for m in (8, 4)]
    return few / many, f"""With 64 GPUs a step lasts m + p − 1 = {few:g} micro-batches. With 128 each pipeline has only
        4 micro-batches, and the bubble stays as it is: {many:g}. So the bubble's share of the total time grows from
        {idle[0]:.0f} to {idle[1]:.0f} %, and twice the GPUs are {few:g} / {many:g} = {few / many:.2f} times as
        fast."""  # fmt: skip
