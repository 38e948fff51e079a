"""Computes what tensor parallelism sends, in units of φ = (t−1)/t·b·s·h·bytes: half an activation's ring all-reduce.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053, 3); Korthikanti et al. 2022 (arXiv 2205.05198, 4.2).
"""

from pardemo.formulas import check_ranks

ALL_REDUCE = 2  # φ: a reduce-scatter and an all-gather
HALVES = 2  # of a block: attention and MLP


def phi(batch: int, sequence: int, hidden: int, ranks: int, element_bytes: int = 4) -> float:
    """Bytes that a rank sends, and receives, in half an all-reduce of an activation [batch, sequence, hidden]."""
    check_ranks(ranks)
    return (ranks - 1) / ranks * batch * sequence * hidden * element_bytes


def half(backward: bool = True) -> int:
    """φ of an MLP or an attention: one all-reduce forward (g), one backward (f)."""
    return ALL_REDUCE * (1 + backward)


def block(recomputed: str = "none") -> int:
    """φ of a block: 8; 12 when it is recomputed as a whole (``"all"``).

    ``"until needed"``: a recomputation that stops at the last tensor which the backward pass waits for runs only the
    attention's all-reduce again: 10. That holds for a block without dropout behind its last all-reduce (a dropout's
    mask is made behind it) and checkpointed on its own.
    """
    again = {"none": 0, "until needed": 1, "all": HALVES}
    if recomputed not in again:
        raise ValueError(f"recomputed must be one of {', '.join(again)}, not {recomputed!r}")
    return HALVES * half() + again[recomputed] * ALL_REDUCE


def rows_first() -> int:
    """φ of an MLP's first layer when it is cut by rows: its sums, b·s·4h wide, are all-reduced before GeLU, forward."""
    return 4 * ALL_REDUCE


def loss_elements(tokens: int) -> int:
    """Numbers all-reduced for a vocabulary-parallel loss: largest logit, Σexp and the target's logit of each token."""
    return 3 * tokens


def flops_forward(batch: int, sequence: int, hidden: int) -> int:
    """Floating-point operations of one block's forward pass on all ranks: 24bsh² + 4bs²h.

    The scores of all pairs of tokens are counted, as in the papers, also where a causal mask hides half of them.
    """
    return 24 * batch * sequence * hidden**2 + flops_core(batch, sequence, hidden)


def flops_core(batch: int, sequence: int, hidden: int) -> int:
    """Operations of the attention core alone: query times key, and scores times value, 2bs²h each."""
    return 4 * batch * sequence**2 * hidden
