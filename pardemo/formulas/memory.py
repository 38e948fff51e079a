"""Bytes that a block keeps for its backward pass, in 16 bits, by Korthikanti et al. 2022 (arXiv 2205.05198, §4).

Counted there: 16-bit activations, one byte per element of a dropout mask, an attention core that stores its scores;
left out: the norms' means and variances, and anything fused.
"""

RECOMPUTE = ("none", "selective", "full")


def block_activation_bytes(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    ranks: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Activation bytes of one block on one of t = ``ranks`` tensor-parallel ranks.

    sbh(10 + 24/t + 5as/ht); with sequence parallelism sbh/t·(34 + 5as/h). Selective recomputation drops the attention
    core's 5as/h; full recomputation keeps the block's input alone, 2sbh (over t with sequence parallelism).
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {ranks}")
    unit = sequence * batch * hidden
    whole = ranks if sequence_parallel else 1  # what the share of each rank is divided by outside the layers
    if recompute == "full":
        return 2 * unit / whole
    core = 5 * heads * sequence / hidden if recompute == "none" else 0
    return unit * (10 / whole + (24 + core) / ranks)


def block_activation_parts(sequence: int, batch: int, hidden: int, heads: int) -> dict[str, int]:
    """The same for one rank, part by part: norms 4, attention 11 + 5as/h, MLP 19, all times sbh."""
    unit = sequence * batch * hidden
    return {
        "norms": 4 * unit,
        "attention": 11 * unit,
        "attention core": 5 * heads * sequence**2 * batch,
        "MLP": 19 * unit,
    }
