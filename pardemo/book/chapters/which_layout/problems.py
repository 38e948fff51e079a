"""The problems of this chapter, and the way to each answer."""

from math import log2

from pardemo.book.page.problems import problem
from pardemo.formulas import memory, pipeline
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of
from pardemo.planner.layouts.machines import Machine

_LLAMA_70B, _LLAMA_405B = (shape_of(name) for name in ("llama3-70b", "llama3.1-405b"))
_NODE = Machine(hardware.gpu("H100"), gpus=8)
_TOKENS = 8192
_GATHERS = rates.between(1)  # of the data sheet's bandwidth, what gathers between nodes reach


def _multiplications() -> float:
    """Seconds of a layer's on each of eight ranks, both passes."""
    weights = sum(product.params for product in _LLAMA_70B.matmuls(_LLAMA_70B.layer_kinds[0][0]))
    return 6 * _TOKENS * weights / 8 / _NODE.matrix_flops


@problem("ms")
def _layer():
    """A layer of Llama 3 70B has 0.8556 billion weights, cut over t = 8 ranks of an H100 node. How long do its matrix
    multiplications take on a rank, forward and backward, for a micro-batch of 8,192 tokens at F = 635.6 TFLOP/s?"""
    milliseconds = 1e3 * _multiplications()
    return milliseconds, f"""A weight takes 6 operations for each token, 2 forward and 4 backward. A rank has an eighth
        of the weights, so it does 6 · 8,192 · 0.8556/8 billion of them,
        {_multiplications() * _NODE.matrix_flops / 1e12:.2f} · 10¹². At {_NODE.matrix_flops / 1e12:.1f} TFLOP/s they
        take {milliseconds:.2f} ms."""  # fmt: skip


@problem("%")
def _all_reduces():
    """The same layer has h = 8,192. Four times, forward and backward together, its 8 ranks all-reduce an activation in
    bf16 over NVLink: 0.8 of 450 GB/s, and 50 µs for each doubling of ranks. If nothing is hidden, how long do these
    all-reduces take, as a part of the multiplications' time?"""
    nbytes = 2 * _TOKENS * _LLAMA_70B.hidden
    once = _NODE.all_reduce(nbytes, 8)
    share = 100 * 4 * once / _multiplications()
    return share, f"""The activation has {nbytes / 1e6:.1f} MB. An all-reduce sends 7/4 of it at {_NODE.rate(8) / 1e9:g}
        GB/s and starts with log₂ 8 = {log2(8):g} latencies: {1e3 * (once - _NODE.latency(8)):.3f} +
        {1e3 * _NODE.latency(8):g} ms. Four of them take {1e3 * 4 * once:.2f} ms, {share:.1f} % of
        {1e3 * _multiplications():.2f} ms. That is what a program gains that hides them."""  # fmt: skip


@problem("GB")
def _states_of_llama():
    """Llama 3 405B (405.9 billion parameters) is trained with t = 8, p = 16 and 128 replicas. Weights are bf16,
    gradients fp32, and ZeRO-1 shares Adam's 12 bytes over the replicas. If all stages are equal, how much memory do the
    model states take on a GPU?"""
    here = _LLAMA_405B.params / (8 * 16)
    states = memory.STATES["Adam, mixed precision, fp32 gradients"]
    kept = memory.model_states_bytes(here, 128, 1, states) / 1e9
    shared = memory.model_states_bytes(here, 128, 2, states) / 1e9
    return kept, f"""A GPU has {here / 1e9:.2f} billion parameters, since t and p divide them by 128. Each takes
        {states.parameters} bytes for the weight, {states.gradients} for the gradient and {states.optimizer}/128 for
        Adam's states, {kept:.1f} GB in all. Two thirds of that are gradients: with ZeRO-2 the states would be
        {shared:.1f} GB."""  # fmt: skip


@problem("chunks")
def _chunks():
    """Llama 3 70B has 80 layers. It is cut into p = 8 stages, and a step has m = 32 micro-batches. What is the least
    number of chunks v, each of whole layers, with which the bubble is at most 5 % of the step's time?"""
    bubble_of = pipeline.bubble_of_total
    bubbles = {v: 100 * bubble_of(8, 32, v) for v in range(1, 11) if 10 % v == 0}
    least = min(v for v, bubble in bubbles.items() if bubble <= 5)
    shares = ", ".join(f"{bubble:.1f} % for v = {v}" for v, bubble in bubbles.items())
    return least, f"""The bubble is (p−1)/(v · m + p−1) of the step. Ten layers can be cut into 1, 2, 5 or 10 chunks,
        which give {shares}. The least that is enough is v = {least}; 32 micro-batches are a multiple of p = 8, as
        chunks need. More chunks would only add messages."""  # fmt: skip


@problem("GPUs")
def _most_gpus():
    """A step has 512 samples of 8,192 tokens, everything is recomputed, and a GPU takes all its samples in one
    micro-batch. H100s reach F = 635.6 TFLOP/s, a node has 100 GB/s to the others, and gathers reach 0.48 of that. Over
    how many GPUs can you spread the step at most so that the gathers of ZeRO-3 still take no longer than the
    multiplications?"""
    tokens = _NODE.matrix_flops / (_GATHERS * 100e9)
    samples = -(-tokens // _TOKENS)
    gpus = 512 / samples
    return gpus, f"""From B = F/(0.48 · T), gathers take as long as multiplications at T =
        {_NODE.matrix_flops / 1e12:.1f} · 10¹²/(0.48 · 100 · 10⁹) = {tokens:,.0f} tokens. A GPU has whole samples of
        8,192 tokens, so it needs {samples:.0f} of them at a time. 512 samples are enough for 512/{samples:.0f} =
        {gpus:.0f} GPUs. On {2 * gpus:.0f} GPUs T is {_TOKENS:,}, and the gathers take {tokens / _TOKENS:.1f} times as
        long as the multiplications."""  # fmt: skip
