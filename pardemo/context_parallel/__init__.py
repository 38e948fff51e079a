"""Context parallelism: the ranks share a sequence, which is too long for one of them.

Everything in a transformer but attention works token by token, and so on S/N tokens as on S. Attention needs the other
ranks' keys and values, which come in one of two ways (:func:`ring_attention`, :func:`ulysses_attention`). Of a layer
with h heads of queries and h_kv of keys of width d, in b samples, a rank sends forward, in elements::

    ring       (N−1)   · 2·b·S/N·h_kv·d              any N; grouped queries make it small; goes on beside the products
    Ulysses    (N−1)/N · 2·b·S/N·(h + h_kv)·d        N divides h; attention as one process computes it

To read first: :mod:`pardemo.context_parallel.plain`, both with send and receive by hand.

Positions (:func:`positions`) are those of the whole sequence, labels are shifted before they are cut (:func:`cut`), and
a mean loss is one over all ranks' labels (:func:`mean_over_tokens`).

Sources: Liu et al. 2023, "Ring Attention" (arXiv 2310.01889); Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv
2309.14509); Llama 3 (arXiv 2407.21783, 3.3.2) for the balanced order.
"""

from pardemo.context_parallel.loss import mean_over_tokens
from pardemo.context_parallel.order import cut, join, pieces_of, positions
from pardemo.context_parallel.ring import ring_attention
from pardemo.context_parallel.ulysses import ulysses_attention

__all__ = [
    "cut",
    "join",
    "mean_over_tokens",
    "pieces_of",
    "positions",
    "ring_attention",
    "ulysses_attention",
]
