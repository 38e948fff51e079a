"""The problems of this chapter, and the way to each answer."""

from math import ceil

from pardemo.book.page.problems import problem
from pardemo.formulas import communication
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of

_FP32 = 4  # bytes
_LLAMA_1B, _LLAMA_8B = (shape_of(name) for name in ("llama3.2-1b", "llama3-8b"))
_H100 = hardware.gpu("H100")
_CARD = rates.between(hardware.link("400"))  # bytes/s that a card of 400 Gbit/s reaches


@problem("GB")
def _must():
    """Llama 3.2 1B has 1.236 billion parameters. DDP trains it on 16 GPUs with gradients in fp32. How much must a rank
    send in a step, on a ring?"""
    gradients = _FP32 * _LLAMA_1B.params
    must = communication.ring_all_reduce(gradients, 16).sent / 1e9
    return must, f"""S is 4 bytes for each parameter, {gradients / 1e9:.3f} GB, and a rank sends 2(N−1)/N = 15/8 of it:
        {must:.2f} GB. That is the number to hold beside what you count."""  # fmt: skip


@problem("s")
def _once_for_each_micro_batch():
    """The same script accumulates m = 8 micro-batches and never tells DDP to wait. Its 16 GPUs are on four nodes, and
    the ring leaves each of them through a card that reaches 24 GB/s. How long do the bytes of a step take that it need
    not have sent?"""
    must = communication.ring_all_reduce(_FP32 * _LLAMA_1B.params, 16).sent
    too_many = 7 * must / _CARD
    return too_many, f"""DDP sums in each of the 8 backward passes, and once would do. Seven sums of {must / 1e9:.2f} GB
        are {7 * must / 1e9:.1f} GB, which take {too_many:.2f} s at {_CARD / 1e9:g} GB/s. The line to add lets DDP sum
        in the last micro-batch alone."""  # fmt: skip


@problem("GPUs")
def _gpus_that_fill_one():
    """A script gathers the fp32 logits of all ranks on each GPU, an H100 with 84.9 GB. Each rank has micro-batches of T
    = 4,096 tokens, and the vocabulary has V = 128,256 entries. From how many GPUs on do these logits alone no longer
    fit?"""
    of_a_rank = _FP32 * 4096 * _LLAMA_8B.vocabulary
    ranks = _H100.memory_bytes / of_a_rank
    return ceil(ranks), f"""The logits of one rank take 4 · T · V bytes, {of_a_rank / 1e9:.2f} GB, and each rank holds
        those of all ranks. {_H100.memory_bytes / 1e9:.1f} GB hold those of {ranks:.1f} ranks, so with {ceil(ranks)}
        GPUs the gathered logits no longer fit, even beside nothing else. A script that runs on 8 GPUs may fail on 64
        for this line."""  # fmt: skip


@problem("tokens")
def _where_the_mend_is_free():
    """DDP sums fp32 gradients over 32 H100s on four nodes, each with a single card of 400 Gbit/s, which reaches B = 24
    GB/s. F is 636 TFLOP/s, and a backward pass takes 4 operations for each parameter and token. From how many tokens T
    of a micro-batch on a GPU on does summing in each micro-batch cost no time?"""
    sent = communication.ring_all_reduce(_FP32, 32).sent  # for each parameter
    tokens = sent / _CARD * rates.matrix(_H100) / 4
    return tokens, f"""A sum sends 31/16 · 4Ψ = {sent:g}Ψ bytes, in {sent:g}Ψ/B seconds. A backward pass takes 4Ψ · T/F.
        They are equal at T = {sent:g}/4 · F/B = {tokens:,.0f} tokens, and Ψ cancels. With longer micro-batches every
        sum hides, and summing once saves bytes and no time; with shorter ones each sum that you leave out saves what
        does not hide."""  # fmt: skip


@problem("ms")
def _whole_gradients():
    """FSDP2 trains Llama 3 8B (8.03 billion parameters) on eight H100s, with 4 micro-batches a step and gradients in
    fp32, over links that reach 360 GB/s. With `set_requires_gradient_sync(False)` for all but the last micro-batch, how
    much sending time does a step save, if nothing hides?"""
    gradients = _FP32 * _LLAMA_8B.params
    scattered = communication.ring_half(gradients, 8).sent
    saved = 1e3 * 3 * scattered / rates.inside(_H100)
    more = (gradients - gradients / 8) / 1e9
    return saved, f"""A reduce-scatter sends 7/8 of {gradients / 1e9:.1f} GB, {scattered / 1e9:.1f} GB, and with 4
        micro-batches three of them are left out: {3 * scattered / 1e9:.1f} GB, {saved:.0f} ms at
        {rates.inside(_H100) / 1e9:g} GB/s. For that a rank holds whole gradients instead of an eighth of them,
        {more:.1f} GB more. Inside a node you would rather pay the bytes."""  # fmt: skip
