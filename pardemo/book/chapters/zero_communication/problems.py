"""The problems of this chapter, and the way to each answer."""

import itertools

from pardemo.book.page.problems import problem
from pardemo.formulas import communication
from pardemo.planner import hardware
from pardemo.planner.layouts.configurations import find, of


def _plain_network() -> float:
    """F/B of A100s at half of their rate, with one card of 100 Gbit/s a node: tokens."""
    return hardware.gpu("A100-80GB").flops / 2 / hardware.link("ethernet-100g")


@problem("GB")
def _more_for_zero_3():
    """64 GPUs train Llama 3 8B (8.03 billion parameters) with 8 micro-batches a step, and all that travels is bf16. How
    many GB more does a rank send in a step under ZeRO-3 than under ZeRO-1?"""
    params, n, m = of(find("llama3-8b")).params, 64, 8
    first, third = (communication.zero_step(params, n, stage, m) for stage in (1, 3))
    return (third - first) / 1e9, f"""Ψ numbers of two bytes, times (N−1)/N, are {first / 2e9:.1f} GB. ZeRO-1 sends 2Ψ
        once a step, {first / 1e9:.1f} GB. ZeRO-3 sends 3Ψ with each of {m} micro-batches, {third / 1e9:.0f} GB, which
        is {(third - first) / 1e9:.0f} GB more."""  # fmt: skip


@problem("tokens")
def _tokens_that_hide():
    """Each node has eight A100s, which reach half of 312 TFLOP/s, and one network card of 100 Gbit/s. How many tokens
    must a GPU have in each micro-batch, so that ZeRO-3's traffic hides?"""
    tokens = _plain_network()
    return tokens, f"""The traffic hides where T ≥ F/B. A ring enters a node once, so B is what the node's only card
        carries, {hardware.link('ethernet-100g') / 1e9:g} GB/s. F is {hardware.gpu('A100-80GB').flops / 2e12:g} TFLOP/s,
        and F/B is {tokens:,.0f} tokens."""  # fmt: skip


@problem("micro-batches")
def _micro_batches_for_zero_2():
    """Nodes of eight A100s that reach 156 TFLOP/s each, with one network card of 100 Gbit/s a node. Memory allows
    micro-batches of 8,192 tokens on a GPU. How many micro-batches must a step have, so that all of ZeRO-2's traffic
    fits beside the backward passes?"""
    ratio, tokens = _plain_network(), 8192
    needed = next(m for m in itertools.count(1) if (1 + 1 / m) / 2 * ratio <= tokens)
    return needed, f"""ZeRO-3 would need F/B = {ratio:,.0f} tokens, however many micro-batches there are. ZeRO-2 hides
        where T ≥ (1 + 1/m)/2 · F/B, since it gathers the parameters once a step. So 1 + 1/m must be at most 2T·B/F =
        {2 * tokens / ratio:.3f}, and 1/m at most {2 * tokens / ratio - 1:.3f}: m is {needed} or more."""  # fmt: skip


@problem("times")
def _over_a_card():
    """Eight nodes of eight GPUs, and 16 micro-batches a step. How many times as much does ZeRO-3 send over a node's
    network cards as HSDP, which all-reduces between nodes once a step?"""
    params, hosts, per_host, m = of(find("llama3-8b")).params, 8, 8, 16
    third = communication.zero_step(params, hosts * per_host, 3, m)
    hybrid = per_host * communication.hierarchical_all_reduce(2 * params, hosts, per_host)[1]
    return third / hybrid, f"""ZeRO-3 has three rings through all nodes in each micro-batch, and each sends (N−1)/N·S
        over a card: {third / 1e9:.0f} GB a step for a model of 8 billion parameters. HSDP keeps 16Ψ/G bytes in place of
        16Ψ/N, and all-reduces between the nodes once a step, 2(H−1)/H·S over a card: {hybrid / 1e9:.1f} GB. ZeRO-3
        sends {third / hybrid:.0f} times as much."""  # fmt: skip


@problem("%")
def _longer_with_zero_3():
    """Four nodes of eight H100s (494.5 TFLOP/s each) train Llama 3 8B (8.03 billion parameters) in bf16, with 16
    micro-batches of 8,192 tokens on each GPU. A node has one network card of 50 GB/s each way. By how many per cent is
    ZeRO-3's step longer than its computation, if traffic and computation overlap as far as they can?"""
    params, rate = of(find("llama3-8b")).params, hardware.link("infiniband-400g")
    computes = 6 * params * 8192 / (hardware.gpu("H100").flops / 2)
    sends = communication.zero_step(params, 32, 3) / rate
    across = 8 * communication.hierarchical_all_reduce(2 * params, 4, 8)[1] / rate
    return 100 * (sends / computes - 1), f"""A micro-batch computes for 6ΨT/F = {computes:.3f} s. ZeRO-3 sends
        3(N−1)/N·S over the card meanwhile, in {sends:.3f} s. HSDP would send once a step, for {across:.3f} s, and the
        last backward pass takes {2 / 3 * computes:.3f} s, so it would hide. ZeRO-3's step is
        {100 * (sends / computes - 1):.1f} % longer than its computation."""  # fmt: skip
