"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import communication
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of

_BF16 = 2  # bytes
_LLAMA_8B, _LLAMA_70B = (shape_of(name) for name in ("llama3-8b", "llama3-70b"))
_CARD = rates.LINK_SHARE * hardware.link("400")  # bytes/s that a card of 400 Gbit/s reaches
_H100 = hardware.gpu("H100")


@problem("ms")
def _one_activation():
    """A pipeline stage of Llama 3 70B (8,192 features of a token) sends the activation of a sample of 8,192 tokens in
    bf16 to the next node, over a card that reaches 40 GB/s. The latency is 10 µs. How long does the message take?"""
    nbytes, latency = _BF16 * 8192 * _LLAMA_70B.hidden, 10e-6
    seconds = latency + nbytes / _CARD
    return 1e3 * seconds, f"""The activation has 8,192 · {_LLAMA_70B.hidden:,} numbers of 2 bytes, {nbytes / 1e6:.1f}
        MB. The card carries {_CARD / 1e9:g} GB/s, so α + S/B = 0.01 ms + {1e3 * nbytes / _CARD:.3f} ms =
        {1e3 * seconds:.3f} ms. At α · B = {latency * _CARD / 1e3:g} kB both parts would be equal; here latency is
        nothing."""  # fmt: skip


@problem("GB")
def _saved_by_nodes():
    """Four nodes of eight GPUs all-reduce the gradients of Llama 3 70B (70.55 billion parameters) in bf16. How much
    less does each node send to other nodes by nodes than in one ring that goes node by node?"""
    gradients = _BF16 * _LLAMA_70B.params
    ring = communication.ring_all_reduce(gradients, 32).sent
    by_nodes = 8 * communication.hierarchical_all_reduce(gradients, 4, 8)[1]
    return (ring - by_nodes) / 1e9, f"""S is {gradients / 1e9:.1f} GB. In one ring node by node, a node sends 2(N−1)/N ·
        S with N = 32, {ring / 1e9:.1f} GB. By nodes it sends 2(H−1)/H · S with H = 4, {by_nodes / 1e9:.1f} GB. That is
        {(ring - by_nodes) / 1e9:.1f} GB less, {100 * (1 - by_nodes / ring):.0f} %."""  # fmt: skip


@problem("s")
def _dealt_like_cards():
    """Two nodes of eight GPUs, each with a single card that reaches 40 GB/s, all-reduce the bf16 gradients of Llama 3
    8B (8.03 billion parameters) in one ring. The scheduler has dealt the ranks out to the nodes in turns. How much
    longer do the bytes take than in a ring node by node?"""
    once = communication.ring_all_reduce(_BF16 * _LLAMA_8B.params, 16).sent / _CARD
    longer = 8 * once - once
    return longer, f"""A ring node by node leaves each node once, so the card carries what one rank sends: 15/8 of
        {_BF16 * _LLAMA_8B.params / 1e9:.2f} GB, in {once:.3f} s. Dealt out in turns, all G = 8 ranks of a node send to
        the other node over the same card, in {8 * once:.2f} s. A step takes {longer:.2f} s longer, for the numbering
        alone."""  # fmt: skip


@problem("tokens")
def _tokens_that_hide():
    """Each of the 16 H100s of two nodes holds a replica of a model and computes at F = 636 TFLOP/s; each node has one
    card, which reaches 10 GB/s. A step has one micro-batch, gradients are bf16 and all-reduced by nodes, and what is
    sent inside a node is left out. From how many tokens on each GPU on can the all-reduce hide behind the backward
    pass?"""
    rate, card = rates.matrix(_H100), rates.LINK_SHARE * hardware.link("100")
    crossing = 8 * communication.hierarchical_all_reduce(_BF16, 2, 8)[1]  # bytes of a parameter
    tokens = crossing / card / (4 / rate)
    return tokens, f"""By nodes, with H = 2, a node sends 2(H−1)/H = {crossing / _BF16:g} times the gradients. Of a
        billion parameters that is {crossing:g} GB, which takes {crossing * 1e9 / card:g} s at
        {card / 1e9:g} GB/s. The backward pass takes 4 operations for each parameter and token,
        {1e6 * 4e9 / rate:.3f} µs for the billion and a token. So it is long enough from {tokens:,.0f} tokens on,
        however large the model is; with fewer tokens, send less or less often."""  # fmt: skip


@problem("times")
def _without_the_slow_node():
    """A step on 128 nodes computes for 7 s, and then all-reduces gradients between the nodes for 1 s. The card of one
    node falls to a quarter of its bandwidth, but you can leave this node out and share the same batch among 127. How
    many times as fast is training then as with the slow node?"""
    by_nodes = communication.hierarchical_all_reduce
    longer = by_nodes(1, 127, 8)[1] / by_nodes(1, 128, 8)[1]  # a hair less than 1
    with_it = 7 + 1 * 4
    without = 7 * 128 / 127 + 1 * longer
    return with_it / without, f"""All nodes wait for the slow card, so the all-reduce takes 4 s and the step {with_it}
        s. On 127 nodes each computes 128/127 times as long, and the all-reduce, 2(H−1)/H · S, is as long as before: the
        step takes {without:.2f} s. Without the node training is {with_it / without:.3f} times as fast. So test pairs of
        nodes first, and leave out the one that is slow."""  # fmt: skip
