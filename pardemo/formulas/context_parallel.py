"""Computes what ranks that share one sequence send, compute and wait for; bytes are one rank's, and of one layer.

``tokens`` is the whole sequence, ``width`` a token's numbers in all heads of queries, ``kv_width`` those in all heads
of keys (values have as many). Each of N ranks has tokens/N of them.

Sources: Liu et al. 2023, ring attention (arXiv 2310.01889, 3); Jacobs et al. 2023, DeepSpeed Ulysses (arXiv
2309.14509, 3.2); Fang and Zhao 2024, both together (arXiv 2405.07719).
"""

from pardemo.formulas import check_ranks

FORWARD, BACKWARD = 1, 2  # laps of keys and values; the second backward one is their gradients'
ORDERS = ("zigzag", "plain")


def ring_bytes(
    batch: int, tokens: int, kv_width: int, ranks: int, element_bytes: int = 2, laps: int = FORWARD + BACKWARD
) -> float:
    """Keys and values of a rank's tokens go on N − 1 times: (N−1)·2·b·tokens/N·kv_width, forward.

    Backward they go round again, and their gradients behind them, here with as many bytes: ``laps`` is 1 forward, 2
    backward, 3 both.
    """
    check_ranks(ranks)
    return laps * (ranks - 1) * 2 * batch * tokens / ranks * kv_width * element_bytes


def ulysses_bytes(
    batch: int, tokens: int, width: int, kv_width: int, ranks: int, element_bytes: int = 2, passes: int = 2
) -> float:
    """All-to-alls of queries, keys, values and outputs: (N−1)/N·2·b·tokens/N·(width + kv_width) in each pass.

    Args:
        kv_width: as it is sent; where heads of keys do not divide by the ranks they are repeated first
            (:func:`kv_heads_sent`). passes: 1 forward, 2 both.
    """
    check_ranks(ranks)
    return passes * (ranks - 1) / ranks * 2 * batch * tokens / ranks * (width + kv_width) * element_bytes


def kv_heads_sent(heads: int, kv_heads: int, ranks: int) -> int:
    """Heads of keys that Ulysses sends: with those of the model, or repeated until each rank has those it needs.

    Raises:
        ValueError: the ranks do not divide the heads of queries.
    """
    check_ranks(ranks)
    if heads % ranks:
        raise ValueError(f"{heads} heads do not divide by {ranks} ranks")
    return next(
        kv_heads * times
        for times in range(1, heads // kv_heads + 1)
        if kv_heads * times % ranks == 0 and heads % (kv_heads * times) == 0
    )


def both_bytes(batch: int, tokens: int, width: int, kv_width: int, inside: int, across: int) -> tuple[float, float]:
    """Forward bytes of ``inside`` ranks with Ulysses in each of ``across`` groups, between which a ring goes.

    The all-to-alls of a group share tokens/``across`` tokens, and the ring passes on 1/``inside`` of the heads' keys.

    Returns:
        Bytes to ranks of the own group, and to the next group.
    """
    return (
        ulysses_bytes(batch, tokens // across, width, kv_width, inside, passes=1),
        ring_bytes(batch, tokens, kv_width // inside, across, laps=FORWARD),
    )


def blocks_seen(rank: int, ranks: int, order: str = "zigzag") -> int:
    """Blocks that a rank computes, of (2N)² of a causal attention, half-seen ones as whole ones.

    Zigzag: 2N + 1 on every rank; plain: 4·rank + 3.
    """
    check_ranks(ranks)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    return 2 * ranks + 1 if order == "zigzag" else 4 * rank + 3


def attention_flops(batch: int, tokens: int, width: int, ranks: int, passes: float = 3.5) -> float:
    """Floating-point operations of causal attention on each of N ranks: 2·b·tokens²·width/N forward.

    A backward pass has five products where the forward pass has two (FlashAttention-2, arXiv 2307.08691, 4.1):
    ``passes`` is 1 forward, 2.5 backward, 3.5 both.
    """
    check_ranks(ranks)
    return passes * 2 * batch * tokens**2 * width / ranks


def ring_seconds(compute_s: float, sent_bytes: float, bytes_per_s: float) -> float:
    """A ring that sends while it computes: the longer of the two (its first and last steps left out)."""
    return max(compute_s, sent_bytes / bytes_per_s)


def ulysses_seconds(compute_s: float, sent_bytes: float, bytes_per_s: float) -> float:
    """All-to-alls before and after attention, which nothing hides: the sum."""
    return compute_s + sent_bytes / bytes_per_s


def tokens_that_hide_a_ring(kv_share: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Tokens on each rank from which on a causal ring's forward messages take no longer than its products.

    2·kv_share·F/B, with 2 bytes to a number; ``kv_share`` is heads of keys over heads of queries. Without a causal mask
    it is half as many, which is the bound of Liu et al. (arXiv 2310.01889, 3).
    """
    return 2 * kv_share * flops_per_s / bytes_per_s
