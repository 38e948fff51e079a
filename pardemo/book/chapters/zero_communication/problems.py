"""The problems of this chapter, and the way to each answer."""

import itertools

from pardemo.book.page.problems import problem
from pardemo.formulas import communication
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of


def _plain_network() -> float:
    """F/B of A100s, with one card of 100 Gbit/s a node: tokens."""
    return rates.matrix(hardware.gpu("A100-80GB")) / rates.between(hardware.link("ethernet-100g"))


@problem("GB")
def _more_for_zero_3():
    """64 GPUs train Llama 3 8B (8.03 billion parameters) with 8 micro-batches a step, and all that travels is bf16. How
    many GB more does a rank send in a step under ZeRO-3 than under ZeRO-1?"""
    params, n, m = shape_of("llama3-8b").params, 64, 8
    first, third = (communication.zero_step(params, n, stage, m) for stage in (1, 3))
    return (third - first) / 1e9, f"""Ψ numbers of two bytes, times (N−1)/N, are {first / 2e9:.1f} GB. ZeRO-1 sends 2Ψ
        once a step, {first / 1e9:.1f} GB. ZeRO-3 sends 3Ψ with each of {m} micro-batches, {third / 1e9:.0f} GB, which
        is {(third - first) / 1e9:.0f} GB more."""  # fmt: skip


@problem("tokens")
def _tokens_that_hide():
    """Each node has eight A100s, which reach 271.2 TFLOP/s in a step, and one network card, on which gathers reach
    6 GB/s. How many tokens must a GPU have in each micro-batch, so that ZeRO-3's traffic hides, if gradients travel in
    fp32?"""
    tokens = 1.5 * _plain_network()
    return tokens, f"""F/B is {_plain_network():,.0f} tokens. In the forward pass 2Ψ bytes travel beside 2ΨT operations,
        so T ≥ F/B is enough. In the backward pass parameters in bf16 and gradients in fp32 are 6Ψ bytes beside 4ΨT
        operations: T ≥ 3/2 · F/B, {tokens:,.0f} tokens. Both have to hide."""  # fmt: skip


@problem("micro-batches")
def _micro_batches_for_zero_2():
    """The same nodes, under ZeRO-2 with gradients in bf16. A micro-batch has 24,576 tokens on a GPU. How many
    micro-batches must a step have, so that ZeRO-2 adds at most 5 % to the computation?"""
    ratio, tokens = _plain_network(), 24_576
    r = ratio / tokens
    needed = next(m for m in itertools.count(1) if max(0.0, r - 2) / 3 + r / (3 * m) <= 0.05)
    return needed, f"""κ = F/(B·T) is {r:.3f}, below 2, so the gradients hide beside the backward passes. The gather
        comes after the update and waits: κ/(3m) of the computation. It is at most 0.05 if m is at least
        {r / 0.15:.2f}, so it takes {needed}."""  # fmt: skip


@problem("times")
def _over_a_card():
    """Eight nodes of eight GPUs, and 16 micro-batches a step. How many times as much does ZeRO-3 send over a node's
    network cards as HSDP, which all-reduces between nodes once a step?"""
    params, hosts, per_host, m = shape_of("llama3-8b").params, 8, 8, 16
    third = communication.zero_step(params, hosts * per_host, 3, m)
    hybrid = per_host * communication.hierarchical_all_reduce(2 * params, hosts, per_host)[1]
    return third / hybrid, f"""ZeRO-3 has three rings through all nodes in each micro-batch, and each sends (N−1)/N·S
        over a card: {third / 1e9:.0f} GB a step for Llama 3 8B. HSDP keeps 16Ψ/G bytes in place of
        16Ψ/N, and all-reduces between the nodes once a step, 2(H−1)/H·S over a card: {hybrid / 1e9:.1f} GB. ZeRO-3
        sends {third / hybrid:.0f} times as much."""  # fmt: skip


@problem("%")
def _longer_with_zero_3():
    """Four nodes of eight H100s (635.6 TFLOP/s each) train Llama 3 8B (8.03 billion parameters) in bf16, with 16
    micro-batches of 16,384 tokens on each GPU. Gathers reach 24 GB/s on a node's only network card. By how many per
    cent is ZeRO-3's step longer than its computation, if traffic and computation overlap as far as they can?"""
    params, rate = shape_of("llama3-8b").params, rates.between(hardware.link("infiniband-400g"))
    computes = 6 * params * 16_384 / rates.matrix(hardware.gpu("H100"))
    sends = communication.zero_step(params, 32, 3) / rate
    across = 8 * communication.hierarchical_all_reduce(2 * params, 4, 8)[1] / rate
    hybrid = max(0.0, across - 2 / 3 * computes) / 16 / computes
    return 100 * (sends / computes - 1), f"""A micro-batch computes for 6ΨT/F = {computes:.3f} s, and 3(N−1)/N·S cross
        the card in {sends:.3f} s. Each pass has its share of both, a third forward and two thirds backward, so neither
        hides, and the step is {100 * (sends / computes - 1):.1f} % longer. HSDP sends once a step, for {across:.3f} s
        beside the last backward pass: it adds {100 * hybrid:.1f} %."""  # fmt: skip
