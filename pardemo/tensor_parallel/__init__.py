"""Tensor parallelism: every rank computes a part of every layer.

To read first: :mod:`pardemo.tensor_parallel.plain`, the same cuts with ``torch.distributed`` alone.

Sources: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053, 3), for the splits; Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), for sequence parallelism.

From the bottom up:

- :mod:`~pardemo.tensor_parallel.operators`: f and g and their relatives, each a forward and a backward.
- :class:`ColumnParallelLinear` and :class:`RowParallelLinear`: a layer cut by its outputs or by its inputs.
- :class:`ParallelMLP`, :class:`ParallelAttention`, :class:`ParallelBlock`: first columns, then rows, so that one
  all-reduce forward and one backward are enough for each half.
- :class:`VocabParallelEmbedding`, :func:`vocab_parallel_cross_entropy`: the vocabulary cut over the ranks.

Every constructor takes the **full** layer, the same on every rank, and keeps this rank's part of it; the full layer
is left as it was. All ranks of the group call it together: it compares checksums of the full layers first, and raises a
ValueError where they differ (:mod:`~pardemo.tensor_parallel.full_layers`). Activations are [batch, sequence, hidden].

In training: hooks on a part's ``.grad``, ``torch.autograd.grad``, a deep copy (an average of weights) and
``torch.compile`` work as with the full model, and so do ``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler``
(:mod:`~pardemo.tensor_parallel.gradients`), called on all ranks; a pipeline's stages are clipped together by
``pardemo.zero.gradient_norm.clip_grad_norm_``. Seed the ranks' generators alike for random numbers of your own on
activations that all ranks hold (drop path, ``F.dropout``), and differently for dropout in cores and activations.
"""

from pardemo.tensor_parallel.block import ParallelAttention, ParallelBlock, ParallelMLP
from pardemo.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pardemo.tensor_parallel.module import on_shards
from pardemo.tensor_parallel.operators import (
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    scatter_sequence,
)
from pardemo.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelMLP",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to",
    "gather_from",
    "gather_sequence",
    "on_shards",
    "reduce_from",
    "reduce_scatter_sequence",
    "scatter_sequence",
    "vocab_parallel_cross_entropy",
]
