"""Attention of some queries to some keys, in a form that can be merged: outputs with their logarithms of sums.

Softmax over keys that are seen in several blocks needs no second look at the first ones. Each block gives its own
softmax's output o and the logarithm ℓ of its sum of exponentials; two blocks are merged by weights that sum to 1::

    ℓ = log(exp ℓ₁ + exp ℓ₂)        o = exp(ℓ₁ − ℓ)·o₁ + exp(ℓ₂ − ℓ)·o₂

(Milakov and Gimelshein 2018, arXiv 1805.02867; Rabe and Staats 2021, arXiv 2112.05682). The way back needs nothing but
the final ℓ: each block's weights are exp(scores − ℓ) at once (FlashAttention, arXiv 2205.14135, algorithm 4).

Shapes: queries [b, h, s, d]; keys [b, h_kv, t, d], values [b, h_kv, t, d_v], where h_kv divides h; ℓ [b, h, s] in fp32,
or fp64. On CPUs torch's own fused kernel does it, which keeps no scores; elsewhere, with a mask, and where values have
another width than keys, the two products stand here.
"""

import torch

from pardemo import compat


def merge(
    out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, more_log_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and ℓ of both blocks' keys together; a query that saw no key in either has ℓ = −∞ and 0."""
    both = torch.logaddexp(log_sum, more_log_sum)
    safe = both.masked_fill(both == -torch.inf, 0)  # else −∞ − −∞
    weights = [(part_log_sum - safe).exp().unsqueeze(-1) for part_log_sum in (log_sum, more_log_sum)]
    return weights[0] * out + weights[1] * more, both


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A block's output [b, h, s, d_v], in fp32 at least, and ℓ [b, h, s].

    Args:
        causal: queries and keys are the same tokens, and none sees a later one. mask: [b, s, t], True where a query
            sees a key.
    """
    if _fused(q, v, mask):
        out, log_sum = compat.attention_cpu(q, k, v, 0.0, causal)
        return out.to(log_sum.dtype), log_sum
    scores = _scores(q, k, causal, mask)  # [b, h_kv, g, s, t]
    log_sum = scores.logsumexp(-1)
    weights = _weights(scores, log_sum)
    out = weights @ v.to(scores.dtype).unsqueeze(2)  # [b, h_kv, g, s, d_v]
    return out.flatten(1, 2), log_sum.flatten(1, 2)


def attend_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    log_sum: torch.Tensor, causal: bool = False, mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of a block's queries, keys and values, in fp32 at least.

    Args:
        gradient, out, log_sum: of the whole softmax over all blocks, not of this one.
    """
    if _fused(q, v, mask):
        gradients = compat.attention_cpu_backward(gradient, q, k, v, out, log_sum, 0.0, causal)
        return tuple(tensor.to(log_sum.dtype) for tensor in gradients)
    kind, groups = log_sum.dtype, k.shape[1]
    scores = _scores(q, k, causal, mask)
    weights = _weights(scores, log_sum.unflatten(1, (groups, -1)))  # [b, h_kv, g, s, t]
    gradient, out, q = (tensor.to(kind).unflatten(1, (groups, -1)) for tensor in (gradient, out, q))
    towards = (gradient * out).sum(-1, keepdim=True)  # [b, h_kv, g, s, 1]: what softmax takes off each score's gradient
    of_scores = weights * (gradient @ v.to(kind).unsqueeze(2).mT - towards) * q.shape[-1] ** -0.5
    of_q = of_scores @ k.to(kind).unsqueeze(2)
    of_k = (of_scores.mT @ q).sum(2)  # over the queries' heads that share a key
    of_v = (weights.mT @ gradient).sum(2)
    return of_q.flatten(1, 2), of_k, of_v


def _fused(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return q.device.type == "cpu" and mask is None and q.shape[-1] == v.shape[-1] and q.shape[-1] > 0


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, mask: torch.Tensor | None) -> torch.Tensor:
    """[b, h_kv, g, s, t] in fp32 at least, −∞ where a query does not see a key; g queries' heads share a key's."""
    kind = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(kind).unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5) @ k.to(kind).unsqueeze(2).mT
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return scores


def _weights(scores: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    """exp(scores − ℓ), and 0 for a query that sees nothing."""
    return (scores - log_sum.masked_fill(log_sum == -torch.inf, 0).unsqueeze(-1)).exp()
