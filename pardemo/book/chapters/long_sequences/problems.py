"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import context_parallel
from pardemo.planner import hardware, rates

_WIDTH, _KV_WIDTH = 4096, 1024  # of Llama 3 8B: 32 heads of queries and 8 of keys, 128 wide


@problem("MB")
def _ring_of_a_book():
    """Llama 3 8B (keys and values have 1,024 numbers a token each), one sample of 131,072 tokens on 8 GPUs, bf16. How
    much does a GPU send in a layer with ring attention, forward and backward?"""
    sent = context_parallel.ring_bytes(1, 131_072, _KV_WIDTH, 8)
    lap = context_parallel.ring_bytes(1, 131_072, _KV_WIDTH, 8, laps=1)
    return sent / 1e6, f"""Keys and values of its 131,072/8 tokens, 1,024 numbers each, go on N−1 = 7 times:
        {lap / 1e6:.4g} MB. Backward they go round again and their gradients behind them, so it is three laps:
        {sent / 1e6:.4g} MB."""  # fmt: skip


@problem("times")
def _ulysses_of_it():
    """The same layer, whose queries have 4,096 numbers a token. How many times as much does the ring send as Ulysses
    does?"""
    ulysses = context_parallel.ulysses_bytes(1, 131_072, _WIDTH, _KV_WIDTH, 8)
    ring = context_parallel.ring_bytes(1, 131_072, _KV_WIDTH, 8)
    return ring / ulysses, f"""Ulysses sends queries, keys, values and outputs, (N−1)/N of them, in two passes:
        {ulysses / 1e6:.4g} MB. The ring sends {ring / 1e6:.4g} MB, {ring / ulysses:.2f} times as much, and hides it.
        The ring's bytes hardly fall with N, and those of Ulysses do."""  # fmt: skip


@problem("tokens")
def _tokens_that_hide():
    """An A100 reaches 271 TFLOP/s in a step, and over a card of 200 Gbit/s 12 GB/s. The model has 32 heads of queries
    and 8 of keys. From how many tokens on each GPU on can a causal ring hide its forward messages?"""
    rate, card = rates.matrix(hardware.gpu("A100-80GB")), rates.between(hardware.link("infiniband-200g"))
    tokens = context_parallel.tokens_that_hide_a_ring(_KV_WIDTH / _WIDTH, rate, card)
    return tokens, f"""From 2·kv/a · F/B tokens on. Here kv/a = {_KV_WIDTH / _WIDTH:g} and F/B = {rate / card:,.0f},
        which gives {tokens:,.0f} tokens on each GPU. With as many heads of keys as of queries it would be four times as
        many."""  # fmt: skip


@problem("times")
def _plain_order():
    """Eight ranks share a causal sequence. How many times as long does attention take in plain order as in zigzag?"""
    plain = context_parallel.blocks_seen(7, 8, "plain")
    zigzag = context_parallel.blocks_seen(7, 8)
    return plain / zigzag, f"""The last rank sees {plain} of its blocks in plain order, and in zigzag {zigzag}, as every
        rank does. All wait for it: {plain / zigzag:.2f} times as long."""  # fmt: skip


@problem("MB")
def _head_limit():
    """A million tokens (2²⁰) of Llama 3 8B on 4 nodes of 8 GPUs: Ulysses inside each node, a ring between them. How
    much does a GPU send to other nodes in a layer's forward pass, in bf16?"""
    inside, across = context_parallel.both_bytes(1, 1_048_576, _WIDTH, _KV_WIDTH, 8, 4)
    return across / 1e6, f"""The ring goes over 4 nodes, and each of a node's 8 ranks passes on an eighth of the heads'
        keys and values: {across / 1e6:.4g} MB, which crosses between nodes. What Ulysses sends, {inside / 1e6:.4g} MB,
        stays inside."""  # fmt: skip
