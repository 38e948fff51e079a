"""Computes parameters, operations, traffic and dropped assignments of a layer with experts.

T tokens of h numbers go to k of E experts each; an expert is a gated MLP with three matrices [h, width]. Sources:
Lepikhin et al. 2020, "GShard" (arXiv 2006.16668, 2.2); Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961,
2.2: capacity); DeepSeek-V3 (arXiv 2412.19437, 2.1.2: few nodes for each token).
"""

import math
from collections.abc import Sequence

from pardemo.formulas import check_ranks


def layer_parameters(hidden: int, width: int, experts: int, shared: int = 0) -> int:
    """The router's h·E, and 3·h·width for each expert and each shared one."""
    return hidden * experts + 3 * hidden * width * (experts + shared)


def token_flops(hidden: int, width: int, experts: int, chosen: int, shared: int = 0) -> int:
    """Operations of a forward pass for one token: of the router, of k experts and of the shared ones."""
    return 2 * layer_parameters(hidden, width, 0, chosen + shared) + 2 * hidden * experts


def one_way_bytes(tokens: float, hidden: int, chosen: int, ranks: int, element_bytes: int = 4) -> float:
    """Bytes that a rank with ``tokens`` sends where its rows go evenly: (N−1)/N·T·k·h numbers, there or back.

    Raises:
        ValueError: no rank.
    """
    check_ranks(ranks)
    return (ranks - 1) / ranks * tokens * chosen * hidden * element_bytes


def capacity(tokens: int, chosen: int, experts: int, factor: float) -> int:
    """Rows that an expert takes: ``factor`` times the even share T·k/E, rounded up.

    Raises:
        ValueError: a factor that is not above 0.
    """
    if not factor > 0:
        raise ValueError(f"a capacity factor is above 0, not {factor!r}")
    return math.ceil(factor * tokens * chosen / experts)


def dropped(load: Sequence[int], capacity: int) -> int:
    """Rows over the capacity: Σ max(0, load − capacity)."""
    return sum(max(0, rows - capacity) for rows in load)


def other_nodes(experts: int, chosen: int, nodes: int) -> float:
    """On how many of the H − 1 other nodes a token has at least one of its k experts, where all choices are as likely.

    A node has E/H experts; none of them is chosen in C(E − E/H, k) of C(E, k) cases.

    Raises:
        ValueError: the experts do not divide by the nodes.
    """
    if nodes < 1 or experts % nodes:
        raise ValueError(f"{experts} experts do not divide over {nodes} nodes")
    none = math.comb(experts - experts // nodes, chosen) / math.comb(experts, chosen)
    return (nodes - 1) * (1 - none)
