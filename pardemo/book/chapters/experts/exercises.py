"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import exercise, formula, fresh_seed, on_ranks
from pardemo.formulas import expert_parallel as formulas

RANKS, COUNT, TOKENS = 2, 6, 24


def check_splits(function: Callable[[torch.Tensor, int], tuple[Sequence[int], Sequence[int]]]) -> str:
    """``function(chosen, experts)`` is how many rows this rank sends to each rank, and receives from each."""
    on_ranks(RANKS, _try_splits, function, fresh_seed())
    return "Right: with these two lists all_to_all_single can move the rows."


def _choices(seed: int) -> list[torch.Tensor]:
    """Of each rank [T, 2]: the first choice of every token is expert 0, and nobody chooses the last expert.

    Rank 1 has four tokens more. So, whatever the seed is, no rank sends what it receives: more than half of all rows go
    to rank 0.
    """
    generator = torch.Generator().manual_seed(seed)
    choices = []
    for rank in range(RANKS):
        chosen = torch.randint(1, COUNT - 1, (TOKENS + 4 * rank, 2), generator=generator)
        chosen[:, 0] = 0
        choices.append(chosen)
    return choices


def _try_splits(function: Callable, seed: int) -> str:
    rank, choices = dist.get_rank(), _choices(seed)
    counts = [chosen.flatten().bincount(minlength=COUNT).view(RANKS, -1).sum(1).tolist() for chosen in choices]
    sends, receives = counts[rank], [of_rank[rank] for of_rank in counts]
    answer = function(choices[rank].clone(), COUNT)
    try:
        mine, theirs = ([int(number) for number in part] for part in answer)
    except (TypeError, ValueError):
        return f"it should return two lists of {RANKS} numbers, not {answer!r}."
    if len(mine) == COUNT:
        return f"these are counts of the {COUNT} experts: a rank has {COUNT // RANKS} of them, add them up."
    if mine == sends and theirs == receives:
        return ""
    if mine == receives and theirs == sends:
        return "these are the right numbers, but first comes what is sent, then what is received."
    if mine == sends and theirs == sends:
        return "it expects to receive what it sends. The other ranks' routers chose differently: ask them."
    if mine != sends:
        return f"it would send {mine}, and the router chose {sends}."
    return f"it expects to receive {theirs}, and the other ranks send {receives}."


_BIAS = torch.tensor([0.5, -0.25, 0.0, 0.125])


@formula(
    [(_BIAS, torch.tensor(load)) for load in ([9, 1, 4, 2], [4, 4, 4, 4], [0, 0, 12, 4])],
    "Right: it needs no gradient, and it disturbs none.",
    asked="the new biases, a tensor of 4 numbers",
    abs=1e-6,
)
def check_bias(bias: torch.Tensor, load: torch.Tensor):
    """The bias of each expert after one step of 0.001."""
    off = load.float().mean() - load.float()
    step = 0.001 * off.sign()
    return bias + step, [
        (bias - step, "experts that got more than the mean would get still more: turn the sign round"),
        (bias + 0.001 * off, "each step should be 0.001 or nothing, however far from the mean the load is"),
        (step, "the step is right; it has to be added to the bias of before"),
        (bias, "nothing changed"),
    ]


@formula(
    ((4096, 7168, 8, 64, 58), (8192, 2880, 4, 8, 36)),
    "Right: 4(N−1)/N·T·k·h numbers for each layer.",
    unit="bytes",
    rel=1e-3,
)
def check_bytes(tokens: int, hidden: int, chosen: int, ranks: int, layers: int):
    """The bytes that a rank sends in a step, in 16 bits."""
    one_way = layers * formulas.one_way_bytes(tokens, hidden, chosen, ranks, 2)
    return 4 * one_way, [
        (one_way, "rows travel there, and back, forward and once more backward"),
        (2 * one_way, "there and back is the forward pass alone, or one direction of both passes"),
        (8 * one_way, "16 bits are two bytes"),
        (4 * one_way * ranks / (ranks - 1), "rows whose expert lies on their own rank do not travel"),
        (4 * one_way / chosen, "a token goes to k experts, as k rows"),
        (4 * one_way / layers, "that is a single layer"),
    ]


@exercise("splits")
def my_splits(chosen, experts):
    """Count the rows of each expert first, also of those that nobody chose; neighbouring experts lie on one rank.
    What you will receive only the others know: ask them with one collective."""
    ranks = dist.get_world_size()
    counts = chosen.flatten().bincount(minlength=experts)  # also of experts that nobody chose
    sends = counts.view(ranks, -1).sum(1)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends)
    return sends.tolist(), receives.tolist()


@exercise("bias")
def my_bias(bias, load):
    """An expert that got less than the mean should be chosen more often. Only the direction counts, and not how far
    from the mean it is."""
    below = load.float().mean() - load.float()  # who got less than the mean is to get more
    return bias + 0.001 * below.sign()


@exercise("bytes")
def my_bytes(tokens, hidden, chosen, ranks, layers):
    """How many exchanges does a layer have in a forward pass, and how many in a backward pass? Rows whose expert
    lies on their own rank do not travel."""
    one_way = (ranks - 1) / ranks * tokens * chosen * hidden * 2
    return layers * 4 * one_way  # there and back, forward and backward
