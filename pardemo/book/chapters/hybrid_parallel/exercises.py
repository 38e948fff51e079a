"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable

from pardemo.book.page.exercises import Mistake, call, exercise, formula
from pardemo.groups import ParallelDims


def check_groups(function: Callable[[str, int, int, int], list[list[int]]]) -> str:
    """``function(axis, tp, dp, pp)`` lists the groups of the order tp-dp-pp."""
    for tp, dp, pp in ((2, 4, 1), (2, 2, 2), (8, 64, 1), (1, 3, 4)):
        for axis in ("tp", "dp", "pp"):
            _compare_groups(call(function, axis, tp, dp, pp), axis, {"tp": tp, "dp": dp, "pp": pp})
    return "Megatron-core builds the same ones."


def _compare_groups(answer: object, axis: str, sizes: dict[str, int]) -> None:
    try:
        groups = sorted(sorted(int(rank) for rank in group) for group in answer)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise Mistake(f"It returned {str(answer)[:60]}; it should return a list of lists of ranks.") from None
    expected = ParallelDims(**sizes).groups(axis)
    if groups == expected:
        return
    where = f"For {' × '.join(f'{name} {size}' for name, size in sizes.items())}, axis {axis}"
    size, number = sizes[axis], len(expected)
    if len(groups) == size != number and all(len(group) == number for group in groups):
        raise Mistake(f"{where}: size and number are swapped: {number} groups of {size}, not {size} of {number}.")
    for order in ("pp-dp-tp", "dp-tp-pp", "tp-pp-dp", "dp-pp-tp", "pp-tp-dp"):
        if groups == ParallelDims(**sizes, order=order).groups(axis):
            raise Mistake(f"{where}: these are the groups of the order {order}; here tp runs fastest, then dp.")
    if len(groups) != number:
        raise Mistake(f"{where}: there are {number} groups, not {len(groups)}.")
    wrong = next(group for group in groups if group not in expected)
    raise Mistake(f"{where}: {wrong[:8]} is no group; rank 0's is {expected[0][:8]}.")


def check_order(function: Callable[[], str]) -> str:
    """``function()`` is the order whose tp groups stay in a node of 8 and whose dp groups span the fewest nodes."""
    order = call(function)
    try:
        layout = ParallelDims(tp=4, dp=4, pp=2, order=str(order))
    except ValueError as error:
        raise Mistake(f"{error}.") from None
    tp, dp = _nodes(layout, "tp"), _nodes(layout, "dp")
    if tp > 1:
        raise Mistake(f"With {order} a tensor-parallel group spans {tp} nodes: let tp run fastest.")
    if dp > (best := _nodes(ParallelDims(tp=4, dp=4, pp=2), "dp")):
        raise Mistake(
            f"Tensor parallelism stays inside. But a data-parallel group spans {dp} nodes, {best} are enough: "
            "pipeline stages exchange the least, so they can be furthest apart."
        )
    return "Tensor parallel inside a node, data parallel next, pipeline stages furthest apart."


def _nodes(layout: ParallelDims, axis: str) -> int:
    """How many nodes of 8 ranks a group of this axis spans at most."""
    return max(len({rank // 8 for rank in group}) for group in layout.groups(axis))


@formula(
    ((8.3e9, 72, 3072, 1024, 198_000.0, 512, 130e12), (1e9, 24, 2048, 16_384, 90_000.0, 8, 989e12)),
    "Recomputation lowers it, since it costs seconds and adds nothing to the model.",
    asked="a number, a share of the peak",
    rel=1e-3,
)
def check_mfu(params: float, layers: int, hidden: int, sequence: int, tokens_per_s: float, gpus: int, peak: float):
    """The MFU, with recomputed layers."""
    scores, per_token = 12 * layers * hidden * sequence, tokens_per_s / gpus / peak
    right = (6 * params + scores) * per_token
    return right, [
        (
            (8 * params + 16 / 12 * scores) * per_token,
            "that is HFU: a forward pass that is run again counts once",
        ),
        (6 * params * per_token, "the attention is missing: it compares each token with all others of its sample"),
        (2 * params * per_token, "that is the forward pass alone, and without the attention"),
        (right * gpus, "that is against one GPU's peak, but all of them worked"),
        (100 * right, "that is in per cent; return a share"),
    ]


@exercise("groups")
def my_groups(axis, tp, dp, pp):
    """How many ranks does a group along this axis have, and how far apart are two neighbours in it? With these two
    numbers, a group is known by its first rank."""
    # How many ranks a group has, and how far apart two neighbours are: tp runs
    # fastest, then dp, then pp.
    size, apart = {"tp": (tp, 1), "dp": (dp, tp), "pp": (pp, tp * dp)}[axis]
    first = [rank for rank in range(tp * dp * pp) if rank // apart % size == 0]
    return [[rank + apart * i for i in range(size)] for rank in first]


@exercise("order")
def my_order():
    """The name that comes first runs fastest: its groups are ranks side by side. Which of the three talks the most,
    and which the least?"""
    # tp talks in every layer, dp once a step, and pipeline stages exchange the least.
    return "tp-dp-pp"


@exercise("mfu")
def my_mfu(params, layers, hidden, sequence, tokens_per_s, gpus, peak):
    """What does one token need, forward and backward, in multiplications with weights and in the attention's, which
    have none? Then ask how many of that all GPUs together could do in a second."""
    # What the model needs for a token: 6 for each parameter, and the attention's
    # multiplications, which have none. That a layer is recomputed is not for the model.
    flops = 6 * params + 12 * layers * hidden * sequence
    return flops * tokens_per_s / (gpus * peak)
