"""The problems of this chapter, and the way to each answer."""

import math

from pardemo.book.page.problems import problem
from pardemo.formulas import communication
from pardemo.planner import hardware, rates


@problem("µs")
def _one_message():
    """A message of 1 MB goes over InfiniBand of 400 Gbit/s, and α is 5 µs. How long does it take?"""
    rate = hardware.link("infiniband-400g")
    bytes_us = 1e6 * 1e6 / rate
    return 5 + bytes_us, f"""A byte has 8 bits, so 400 Gbit/s are B = {rate / 1e9:g} GB/s, and S/B is {bytes_us:g} µs.
        The α of 5 µs comes on top: α + S/B = {5 + bytes_us:g} µs."""  # fmt: skip


@problem("MB")
def _nine_tenths():
    """On a network card of 100 Gbit/s, α is 20 µs. How large must a message be to travel at nine tenths of the card's
    rate, α included?"""
    meanwhile = 20e-6 * hardware.link("ethernet-100g")
    return 9 * meanwhile / 1e6, f"""While a message gets going, the card could carry α·B = {meanwhile / 1e3:g} kB. A
        message reaches nine tenths of the rate if its bytes take nine tenths of its time, and α one tenth. So the bytes
        take nine times as long as α: S = 9·α·B = {9 * meanwhile / 1e6:g} MB."""  # fmt: skip


@problem("s")
def _one_node_after_the_other():
    """Node 0 has 16 GB of weights, and 15 other nodes need them. Each node has one network card of 400 Gbit/s. Node 0
    sends the weights to one node after the other. How long does it take until all nodes have them?"""
    size, rate = 16e9, hardware.link("infiniband-400g")
    sent = communication.parameter_server(size, 16).sent
    return sent / rate, f"""In a chain each node passes pieces on while the next ones arrive, and all are done after
        little more than S/B = {size / rate:g} s. But here all bytes go over node 0's card: it sends {sent / size:g}·S
        = {sent / 1e9:g} GB, which takes {sent / rate:g} s."""  # fmt: skip


@problem("tokens")
def _more_nodes_pay():
    """Four nodes of eight A100s have one network card of 200 Gbit/s each, of which large messages reach 0.8. During the
    backward pass a ring through all 32 GPUs sums the bf16 gradients. That pass takes 4 operations for each parameter
    and token, at 271 TFLOP/s a GPU. How many tokens must each GPU have, so that the all-reduce takes no longer than the
    pass?"""
    flops, rate = rates.matrix(hardware.gpu("A100-80GB")), rates.LINK_SHARE * hardware.link("infiniband-200g")
    nbytes = communication.ring_all_reduce(2, 32).sent
    exchange_ps, token_ps = 1e12 * nbytes / rate, 1e12 * 4 / flops
    return exchange_ps / token_ps, f"""For each parameter, 2(N−1)/N · 2 bytes = {nbytes:g} bytes go over a node's card
        of {rate / 1e9:g} GB/s, which takes {exchange_ps:.0f} ps. The backward pass takes {token_ps:.5f} ps for each
        parameter and token. The number of parameters cancels, and {exchange_ps:.2f} / {token_ps:.5f} =
        {exchange_ps / token_ps:,.0f} tokens are enough."""  # fmt: skip


@problem("times")
def _bucket_on_a_thousand():
    """1,024 GPUs sum a bucket of 25 MB, with 5 µs a message and 50 GB/s each way. A double tree takes 2·log₂N messages
    one after the other, and 2·S/B for the bytes. How many times as long as the tree does a ring take?"""
    nbytes, ranks, rate, start = 25e6, 1024, hardware.link("infiniband-400g"), 5e-6
    ring = communication.cluster_seconds("ring", nbytes, ranks, rate, start)
    steps, levels = communication.all_reduce_steps("ring", ranks), 2 * math.log2(ranks)
    tree = levels * start + 2 * nbytes / rate
    return ring / tree, f"""The bytes take about {1e3 * 2 * nbytes / rate:g} ms on both, but so many GPUs wait much
        longer for one another than for a bucket of this size. On the ring {steps:,} messages follow each other, which
        makes {1e3 * ring:.1f} ms in all, and in the tree {levels:g} do, which makes {1e3 * tree:g} ms. So the ring
        takes {ring / tree:.1f} times as long."""  # fmt: skip
