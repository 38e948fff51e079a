"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed
from pardemo.formulas import expert_parallel as formulas
from pardemo.world import World

EXERCISES = {
    "splits": Exercise(
        "my_splits",
        "Count the rows of each expert first, also of those that nobody chose; neighbouring experts lie on one rank. "
        "What you will receive only the others know: ask them with one collective.",
    ),
    "bias": Exercise(
        "my_bias",
        "An expert that got less than the mean should be chosen more often. Only the direction counts, and not how "
        "far from the mean it is.",
    ),
    "bytes": Exercise(
        "my_bytes",
        "How many exchanges does a layer have in a forward pass, and how many in a backward pass? Rows whose expert "
        "lies on their own rank do not travel.",
    ),
}

TIMEOUT_S = 30
RANKS, COUNT, TOKENS = 2, 6, 24


def check_splits(function: Callable[[torch.Tensor, int], tuple[Sequence[int], Sequence[int]]]) -> str:
    """``function(chosen, experts)`` is how many rows this rank sends to each rank, and receives from each."""
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        problems = world.run(_try_splits, function, fresh_seed())
    for rank, problem in enumerate(problems):
        if problem:
            raise Mistake(f"On rank {rank} {problem}")
    return "Right: with these two lists all_to_all_single can move the rows."


def _choices(seed: int) -> list[torch.Tensor]:
    """Of each rank [T, 2]: the first choice of every token is expert 0, and nobody chooses the last expert.

    Rank 1 has four tokens more. So, whatever the seed is, no rank sends what it receives: more than half of all rows go
    to rank 0.
    """
    generator = torch.Generator().manual_seed(seed)
    choices = []
    for rank in range(RANKS):
        tokens = TOKENS + 4 * rank
        chosen = torch.randint(1, COUNT - 1, (tokens, 2), generator=generator)
        chosen[:, 0] = 0
        choices.append(chosen)
    return choices


def _try_splits(function: Callable, seed: int) -> str:
    rank, choices = dist.get_rank(), _choices(seed)
    counts = [chosen.flatten().bincount(minlength=COUNT).view(RANKS, -1).sum(1).tolist() for chosen in choices]
    sends, receives = counts[rank], [of_rank[rank] for of_rank in counts]
    answer = function(choices[rank].clone(), COUNT)
    if not isinstance(answer, list | tuple) or len(answer) != 2:
        return f"it should return two lists of {RANKS} numbers, not {type(answer).__name__}."
    lists = [_as_list(part) for part in answer]
    if lists[0] is None or lists[1] is None:
        return f"it should return two lists of {RANKS} numbers, not {answer!r}."
    mine, theirs = lists
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


def _as_list(part: object) -> list[int] | None:
    """A list of whole numbers as one; None for anything else."""
    if isinstance(part, torch.Tensor):
        part = part.tolist()
    if not isinstance(part, list | tuple):
        return None
    return [int(value) for value in part] if all(isinstance(value, int | float) for value in part) else None


LOADS = ([9, 1, 4, 2], [4, 4, 4, 4], [0, 0, 12, 4])


def check_bias(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    """``function(bias, load)`` is the bias of each expert after one step of 0.001."""
    bias = torch.tensor([0.5, -0.25, 0.0, 0.125])
    for numbers in LOADS:
        load = torch.tensor(numbers)
        result = call(function, bias.clone(), load.clone())
        if not isinstance(result, torch.Tensor) or result.shape != bias.shape:
            raise Mistake(f"It should return the new biases, a tensor of 4 numbers, not {type(result).__name__}.")
        off = load.float().mean() - load.float()
        moved = result - bias
        if torch.allclose(moved, 0.001 * off.sign(), atol=1e-6):
            continue
        for wrong, hint in (
            (-0.001 * off.sign(), "experts that got more than the mean would get still more: turn the sign round"),
            (0.001 * off, "each step should be 0.001 or nothing, however far from the mean the load is"),
            (0.001 * off.sign() - bias, "the step is right; it has to be added to the bias of before"),
            (torch.zeros(4), "nothing changed"),
        ):
            if torch.allclose(moved, wrong, atol=1e-6):
                raise Mistake(f"For the load {numbers}: {hint}.")
        raise Mistake(f"For the load {numbers} the biases should move by {(0.001 * off.sign()).tolist()}, not by "
                      f"{[round(value, 5) for value in moved.tolist()]}.")  # fmt: skip
    return "Right: it needs no gradient, and it disturbs none."


def check_bytes(function: Callable[[int, int, int, int, int], float]) -> str:
    """``function(tokens, hidden, chosen, ranks, layers)`` is the bytes that a rank sends in a step, in 16 bits."""
    for tokens, hidden, chosen, ranks, layers in ((4096, 7168, 8, 64, 58), (8192, 2880, 4, 8, 36)):
        answer = call(function, tokens, hidden, chosen, ranks, layers)
        where = f"For T = {tokens}, h = {hidden}, k = {chosen}, {ranks} ranks and {layers} layers"
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            raise Mistake(f"{where} it returned {type(answer).__name__}, not a number of bytes.")
        one = layers * formulas.one_way_bytes(tokens, hidden, chosen, ranks, 2)
        if abs(answer - 4 * one) <= 1e-3 * 4 * one:
            continue
        for wrong, hint in (
            (one, "rows travel there, and back, forward and once more backward"),
            (2 * one, "there and back is the forward pass alone, or one direction of both passes"),
            (8 * one, "16 bits are two bytes"),
            (4 * one * ranks / (ranks - 1), "rows whose expert lies on their own rank do not travel"),
            (4 * one / chosen, "a token goes to k experts, as k rows"),
            (4 * one / layers, "that is a single layer"),
        ):
            if abs(answer - wrong) <= 1e-3 * wrong:
                raise Mistake(f"{where} a rank sends {4 * one / 1e9:.4g} GB, not {answer / 1e9:.4g}: {hint}.")
        raise Mistake(f"{where} a rank sends {4 * one / 1e9:.4g} GB, not {answer / 1e9:.4g}.")
    return "Right: 4(N−1)/N·T·k·h numbers for each layer."


def my_splits(chosen, experts):
    ranks = dist.get_world_size()
    counts = chosen.flatten().bincount(minlength=experts)  # also of experts that nobody chose
    sends = counts.view(ranks, -1).sum(1)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends)
    return sends.tolist(), receives.tolist()


def my_bias(bias, load):
    below = load.float().mean() - load.float()  # who got less than the mean is to get more
    return bias + 0.001 * below.sign()


def my_bytes(tokens, hidden, chosen, ranks, layers):
    one_way = (ranks - 1) / ranks * tokens * chosen * hidden * 2
    return layers * 4 * one_way  # there and back, forward and backward
