"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import Problem, Worked
from pardemo.formulas import context_parallel
from pardemo.planner import hardware

_WIDTH, _KV_WIDTH = 4096, 1024  # of Llama 3 8B: 32 heads of queries and 8 of keys, 128 wide


def _ring_of_a_book() -> Worked:
    sent = context_parallel.ring_bytes(1, 131_072, _KV_WIDTH, 8)
    lap = context_parallel.ring_bytes(1, 131_072, _KV_WIDTH, 8, laps=1)
    return Worked(
        sent / 1e6, f"Keys and values of its 131,072/8 tokens, 1,024 numbers each, go on N−1 = 7 times: "
        f"{lap / 1e6:.4g} MB. Backward they go round again and their gradients behind them, so it is three laps: "
        f"{sent / 1e6:.4g} MB."
    )  # fmt: skip


def _ulysses_of_it() -> Worked:
    ulysses = context_parallel.ulysses_bytes(1, 131_072, _WIDTH, _KV_WIDTH, 8)
    ring = context_parallel.ring_bytes(1, 131_072, _KV_WIDTH, 8)
    return Worked(
        ring / ulysses, f"Ulysses sends queries, keys, values and outputs, (N−1)/N of them, in two passes: "
        f"{ulysses / 1e6:.4g} MB. The ring sends {ring / 1e6:.4g} MB, {ring / ulysses:.2f} times as much, and hides "
        "it. The ring's bytes hardly fall with N, and those of Ulysses do."
    )  # fmt: skip


def _tokens_that_hide() -> Worked:
    rate = 0.5 * hardware.gpu("H100").flops
    tokens = context_parallel.tokens_that_hide_a_ring(_KV_WIDTH / _WIDTH, rate, 50e9)
    return Worked(
        tokens, f"From 2·kv/a · F/B tokens on. Here kv/a = {_KV_WIDTH / _WIDTH:g} and F/B = {rate / 50e9:,.0f}, which "
        f"gives {tokens:,.0f} tokens on each GPU. With as many heads of keys as of queries it would be "
        "four times as many."
    )  # fmt: skip


def _plain_order() -> Worked:
    plain = context_parallel.blocks_seen(7, 8, "plain")
    zigzag = context_parallel.blocks_seen(7, 8)
    return Worked(
        plain / zigzag, f"The last rank sees {plain} of its blocks in plain order, and in zigzag {zigzag}, as every "
        f"rank does. All wait for it: {plain / zigzag:.2f} times as long."
    )  # fmt: skip


def _head_limit() -> Worked:
    inside, across = context_parallel.both_bytes(1, 1_048_576, _WIDTH, _KV_WIDTH, 8, 4)
    return Worked(
        across / 1e6, "The ring goes over 4 nodes, and each of a node's 8 ranks passes on an eighth of the heads' keys "
        f"and values: {across / 1e6:.4g} MB, which crosses between nodes. What Ulysses sends, {inside / 1e6:.4g} MB, "
        "stays inside."
    )  # fmt: skip


PROBLEMS = (
    Problem(
        "Llama 3 8B (keys and values have 1,024 numbers a token each), one sample of 131,072 tokens on 8 GPUs, bf16. "
        "How much does a GPU send in a layer with ring attention, forward and backward?", "MB", _ring_of_a_book,
    ),
    Problem(
        "The same layer, whose queries have 4,096 numbers a token. How many times as much does the ring send as "
        "Ulysses does?", "times", _ulysses_of_it,
    ),
    Problem(
        "An H100 multiplies at half of its data sheet's 989 TFLOP/s, and has a network card of 50 GB/s. The model has "
        "32 heads of queries and 8 of keys. From how many tokens on each GPU on can a causal ring hide its forward "
        "messages?",
        "tokens", _tokens_that_hide,
    ),
    Problem(
        "Eight ranks share a causal sequence. How many times as long does attention take in plain order as in zigzag?",
        "times", _plain_order,
    ),
    Problem(
        "A million tokens (2²⁰) of Llama 3 8B on 4 nodes of 8 GPUs: Ulysses inside each node, a ring between them. How "
        "much does a GPU send to other nodes in a layer's forward pass, in bf16?", "MB", _head_limit,
    ),
)  # fmt: skip
